"""Which algorithm serves a call: the first line of a table that fits, the same on every rank.

`rules` has the tables, `select` applies them, `tuning_table` holds measured times and
`measured_choices` gives them to a session. Uses schedule and algorithms. Read `select` first.
"""

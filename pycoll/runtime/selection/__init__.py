"""Which algorithm serves a call: the first line of a table that fits, alike on every rank.

`rules` and `message_rules` are the tables, `select` applies them, `tuning_table` holds measured
times and `measured_choices` puts them to use. Uses schedule and algorithms. Read `select` first.
"""

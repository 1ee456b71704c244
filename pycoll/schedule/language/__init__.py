"""What `pycoll.schedule.ir` is made of, and what a collective promises.

`pieces` are the operands of a fold, `collectives` and `promise` the pre- and post-conditions,
`formula` reads the costs that docstrings state, `author_errors` says in which line of an algorithm
an error is. Uses `pycoll.errors` only. Read `pycoll.schedule.ir` first.
"""

"""What `pycoll.schedule.ir` is made of, and what a collective promises.

`pieces` are the operands of a fold, `collectives` and `promise` the pre- and post-conditions,
`formula` reads the costs that docstrings state, `blame` names the author's line in an error.
Uses `pycoll.errors` only. Read `pycoll.schedule.ir` first.
"""

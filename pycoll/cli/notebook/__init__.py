"""Ranks in a notebook: ``%load_ext pycoll``, then ``%%ranks 4`` over a cell.

`magic` is what the notebook sees, `pool` starts ranks and speaks to them, `rank` is what each of
them runs. They are ranks of ``pycoll run``, which stay alive between cells. It may use everything
below it; nothing imports it but ``pycoll.load_ipython_extension``. Read `pool` first.
"""

"""Add up arrays over all ranks: ``pycoll run -n 4 examples/all_reduce.py``."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    x = comm.empty(1 << 20, np.float32)  # symmetric memory, which peers reach
    x[:] = comm.rank + 1
    total = comm.all_reduce(x)  # a new, ordinary array, the same bits on every rank
    comm.all_reduce(x, op="max", out=x)  # in place: peers work on x where it is
    work = comm.all_reduce(np.arange(4.0), async_op=True)  # any array; goes on by itself
    shard = comm.reduce_scatter(np.ones(2 * comm.world_size))  # everybody gets its block
    if comm.rank == 0:
        print(f"{comm.world_size} ranks: {total[0]:g}, {x[0]:g}, {work.wait()}, {shard}")

"""Add up arrays over all ranks: ``pycoll run -n 4 examples/all_reduce.py``."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    x = comm.empty(1 << 20, np.float32)  # symmetric memory, which peers reach
    x[:] = comm.rank + 1
    comm.all_reduce(x, out=x)  # in place: peers work on x where it is
    most = comm.all_reduce(x * comm.rank, op="max")  # any array; the result is a new one
    work = comm.all_reduce(np.arange(4.0), async_op=True)  # goes on by itself
    shard = comm.reduce_scatter(np.ones(2 * comm.world_size))  # everybody gets its block
    if comm.rank == 0:
        print(f"{comm.world_size} ranks: {x[0]:g}, {most[0]:g}, {work.wait()}, {shard}")

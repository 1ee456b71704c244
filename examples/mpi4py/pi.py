"""Approximate pi: the midpoint rule for 4 / (1 + x^2), its intervals dealt out over the ranks."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    intervals = comm.broadcast(100_000 if comm.rank == 0 else 0)
    x = (np.arange(comm.rank, intervals, comm.world_size) + 0.5) / intervals
    pi = comm.reduce(float((4 / (1 + x * x)).sum()) / intervals)
    if comm.rank == 0:
        print(f"pi is {pi:.12f}")

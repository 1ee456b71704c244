"""Sort numbers that are spread over the ranks: splitters from samples, then one all_to_all_v."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    n = comm.world_size
    mine = np.sort(np.random.default_rng(comm.rank).integers(0, 10_000, 1000))
    samples = comm.all_gather(mine[:: -(-mine.size // n)])
    splitters = np.sort(samples)[n::n]
    counts = np.diff(np.searchsorted(mine, splitters), prepend=0, append=mine.size)
    sorted_part = np.sort(comm.all_to_all_v(mine, counts))
    ends = comm.gather_object((sorted_part[0], sorted_part[-1], sorted_part.size))
    for rank, (low, high, size) in enumerate(ends or []):
        print(f"rank {rank} has {size} numbers from {low} to {high}")

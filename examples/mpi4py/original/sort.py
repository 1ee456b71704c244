"""Sort numbers that are spread over the ranks: splitters from samples, then one Alltoallv."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
mine = np.sort(np.random.default_rng(comm.rank).integers(0, 10_000, 1000))
samples = np.empty(comm.size * comm.size, mine.dtype)
comm.Allgather(mine[:: -(-mine.size // comm.size)].copy(), samples)
splitters = np.sort(samples)[comm.size :: comm.size]
sendcounts = np.diff(np.searchsorted(mine, splitters), prepend=0, append=mine.size)
recvcounts = np.empty_like(sendcounts)
comm.Alltoall(sendcounts, recvcounts)
sorted_part = np.empty(recvcounts.sum(), mine.dtype)
comm.Alltoallv([mine, sendcounts], [sorted_part, recvcounts])
sorted_part.sort()
ends = comm.gather((int(sorted_part[0]), int(sorted_part[-1]), sorted_part.size), root=0)
if comm.rank == 0:
    for rank, (low, high, size) in enumerate(ends):
        print(f"rank {rank} has {size} numbers from {low} to {high}")

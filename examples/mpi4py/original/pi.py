"""Approximate pi: the midpoint rule for 4 / (1 + x^2), its intervals dealt out over the ranks."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
intervals = comm.bcast(100_000 if comm.rank == 0 else None, root=0)
x = (np.arange(comm.rank, intervals, comm.size) + 0.5) / intervals
pi = comm.reduce(float((4 / (1 + x * x)).sum()) / intervals, op=MPI.SUM, root=0)
if comm.rank == 0:
    print(f"pi is {pi:.12f}")

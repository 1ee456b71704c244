"""A matrix in row blocks times a vector that is spread over the ranks; then the power method."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rows = 3
n = rows * comm.size
first = comm.rank * rows
a = 1.0 / (1 + np.abs(np.arange(first, first + rows)[:, None] - np.arange(n)))
x = np.ones(rows)
whole = np.empty(n)
for _ in range(20):
    comm.Allgather(x, whole)
    x = a @ whole
    square = np.array(x @ x)
    comm.Allreduce(MPI.IN_PLACE, square, op=MPI.SUM)
    x /= np.sqrt(square)
blocks = comm.gather(x, root=0)
if comm.rank == 0:
    print("eigenvector", np.round(np.concatenate(blocks), 6))
    print(f"norm before scaling {np.sqrt(square):.9f}")

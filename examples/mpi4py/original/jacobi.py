"""Jacobi's method for a hot plate: rows spread over the ranks, one halo row on each side."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
up = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
down = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
rows, columns = 6, 16
plate = np.zeros((rows + 2, columns))
if comm.rank == 0:
    plate[0] = 100.0
for _step in range(200):
    comm.Sendrecv(plate[1], dest=up, recvbuf=plate[-1], source=down)
    comm.Sendrecv(plate[-2], dest=down, recvbuf=plate[0], source=up)
    new = plate.copy()
    new[1:-1, 1:-1] = (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4
    change = comm.allreduce(float(np.abs(new - plate).max()), op=MPI.MAX)
    plate = new
heat = comm.reduce(float(plate[1:-1].sum()), op=MPI.SUM, root=0)
if comm.rank == 0:
    print(f"last change {change:.6e}, heat {heat:.6f}")

"""A token walks the ring once; every rank adds its number to it."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
token = np.zeros(1, np.int64)
if comm.rank == 0:
    comm.Send(token, dest=right, tag=7)
comm.Recv(token, source=left, tag=7)
token += comm.rank
if comm.rank != 0:
    comm.Send(token, dest=right, tag=7)
else:
    print(f"the token is {token[0]} after {comm.size} ranks")

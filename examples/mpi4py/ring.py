"""A token walks the ring once; every rank adds its number to it."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    token = np.zeros(1, np.int64)
    if comm.rank == 0:
        comm.send(token, right, tag=7)
    comm.recv(token, left, tag=7)
    token += comm.rank
    if comm.rank != 0:
        comm.send(token, right, tag=7)
    else:
        print(f"the token is {token[0]} after {comm.world_size} ranks")

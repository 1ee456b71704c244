"""Scatter the blocks of a matrix over a grid of ranks, work on each, gather the matrix again."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
across, down = MPI.Compute_dims(comm.size, 2)
rows, columns = 2, 3
blocks = None
if comm.rank == 0:
    matrix = np.arange(across * rows * down * columns, dtype=np.float64)
    matrix = matrix.reshape(across, rows, down, columns)
    blocks = np.ascontiguousarray(matrix.swapaxes(1, 2))
block = np.empty((rows, columns))
comm.Scatter(blocks, block, root=0)
block -= block.mean()
comm.Gather(block, blocks, root=0)
if comm.rank == 0:
    blocks = blocks.reshape(across, down, rows, columns)
    print(blocks.swapaxes(1, 2).reshape(across * rows, down * columns))

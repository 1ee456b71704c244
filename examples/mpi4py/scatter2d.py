"""Scatter the blocks of a matrix over a grid of ranks, work on each, gather the matrix again."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    across, down = comm.grid((0, 0)).shape
    rows, columns = 2, 3
    matrix = np.arange(across * rows * down * columns, dtype=np.float64)
    blocks = matrix.reshape(across, rows, down, columns).swapaxes(1, 2)
    block = comm.scatter(blocks.reshape(-1, rows, columns))[0]
    blocks = comm.gather(block - block.mean())
    if comm.rank == 0:
        blocks = blocks.reshape(across, down, rows, columns)
        print(blocks.swapaxes(1, 2).reshape(across * rows, down * columns))

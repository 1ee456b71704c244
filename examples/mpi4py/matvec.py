"""A matrix in row blocks times a vector that is spread over the ranks; then the power method."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    rows, square = 3, 0.0
    n = rows * comm.world_size
    first = comm.rank * rows
    a = 1.0 / (1 + np.abs(np.arange(first, first + rows)[:, None] - np.arange(n)))
    x = np.ones(rows)
    for _ in range(20):
        x = a @ comm.all_gather(x)
        square = comm.all_reduce(float(x @ x))
        x /= np.sqrt(square)
    whole = comm.gather(x)
    if comm.rank == 0:
        print("eigenvector", np.round(whole, 6))
        print(f"norm before scaling {np.sqrt(square):.9f}")

"""Jacobi's method for a hot plate: rows spread over the ranks, one halo row on each side."""

import numpy as np

import pycoll

comm = pycoll.init()
grid = comm.grid((comm.world_size,))
rows, columns, change = 6, 16, 0.0
plate = np.zeros((rows + 2, columns))
if comm.rank == 0:
    plate[0] = 100.0
for _ in range(200):
    grid.halo(plate)
    new = plate.copy()
    new[1:-1, 1:-1] = (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4
    change = comm.all_reduce(float(np.abs(new - plate).max()), "max")
    plate = new
heat = comm.reduce(float(plate[1:-1].sum()))
if comm.rank == 0:
    print(f"last change {change:.6e}, heat {heat:.6f}")

"""Cannon's matrix product: blocks walk over a grid of ranks that is a torus."""

import numpy as np
from mpi4py import MPI

side = int(MPI.COMM_WORLD.size**0.5)
grid = MPI.COMM_WORLD.Create_cart((side, side), periods=(True, True), reorder=False)
row, column = grid.Get_coords(grid.rank)
size = 4
a = np.random.default_rng(grid.rank).integers(0, 10, (size, size)).astype(np.float64)
b = np.random.default_rng(100 + grid.rank).integers(0, 10, (size, size)).astype(np.float64)
source, dest = grid.Shift(1, -row)
grid.Sendrecv_replace(a, dest=dest, source=source)
source, dest = grid.Shift(0, -column)
grid.Sendrecv_replace(b, dest=dest, source=source)
c = np.zeros((size, size))
for _ in range(side):
    c += a @ b
    source, dest = grid.Shift(1, -1)
    grid.Sendrecv_replace(a, dest=dest, source=source)
    source, dest = grid.Shift(0, -1)
    grid.Sendrecv_replace(b, dest=dest, source=source)
traces = grid.gather(((row, column), float(np.trace(c)), float(c.sum())), root=0)
if grid.rank == 0:
    for place, trace, total in traces:
        print(f"block {place}: trace {trace:.0f}, sum {total:.0f}")

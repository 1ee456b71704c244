"""Cannon's matrix product: blocks walk over a grid of ranks that is a torus."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    side = int(comm.world_size**0.5)
    grid = comm.grid((side, side), periods=True)
    row, column = grid.coords
    size = 4
    a = np.random.default_rng(grid.rank).integers(0, 10, (size, size)).astype(np.float64)
    b = np.random.default_rng(100 + grid.rank).integers(0, 10, (size, size)).astype(np.float64)
    grid.move(a, 1, -row)
    grid.move(b, 0, -column)
    c = np.zeros((size, size))
    for _ in range(side):
        c += a @ b
        grid.move(a, 1, -1)
        grid.move(b, 0, -1)
    traces = comm.gather_object(((row, column), np.trace(c), c.sum()))
    for place, trace, total in traces or []:
        print(f"block {place}: trace {trace:.0f}, sum {total:.0f}")

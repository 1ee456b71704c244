"""Objects travel as they are: settings to all, a piece of work to each, reports back to rank 0."""

import numpy as np

import pycoll

with pycoll.init() as comm:
    n = comm.world_size
    settings = {"power": 2, "names": ["min", "max"], "weights": np.linspace(0, 1, 5)}
    settings = comm.broadcast_object(settings if comm.rank == 0 else None)
    mine = comm.scatter_object([list(range(rank, 20, n)) for rank in range(n)])
    values = [number ** settings["power"] for number in mine]
    mine = {"rank": comm.rank, "min": min(values), "max": max(values)}
    for report in comm.gather_object(mine) or []:
        print(report["rank"], *(f"{name} {report[name]}" for name in settings["names"]))
    lengths = comm.all_gather_object(len(values))
    if comm.rank == 0:
        print("lengths", lengths, "weights", settings["weights"].sum())

"""Objects travel as they are: settings to all, a piece of work to each, reports back to rank 0."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
settings = {"power": 2, "names": ["min", "max"], "weights": np.linspace(0, 1, 5)}
settings = comm.bcast(settings if comm.rank == 0 else None, root=0)
work = [list(range(rank, 20, comm.size)) for rank in range(comm.size)] if comm.rank == 0 else None
mine = comm.scatter(work, root=0)
values = [number ** settings["power"] for number in mine]
mine = {"rank": comm.rank, "min": min(values), "max": max(values)}
for report in comm.gather(mine, root=0) or []:
    print(report["rank"], *(f"{name} {report[name]}" for name in settings["names"]))
lengths = comm.allgather(len(values))
if comm.rank == 0:
    print("lengths", lengths, "weights", settings["weights"].sum())

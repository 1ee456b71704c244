"""``python finalized.py FOLDER`` on every rank: MPI is finalized before a communicator is closed.

What calls said after that is written to FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import pycoll

comm = pycoll.init(transport="mpi", timeout=20)
idle = comm.dup()
rank, there = comm.rank, comm.rank ^ 1
x = np.ones(10)
comm.all_reduce(x)
MPI.Finalize()
texts = []
for call in (
    lambda: comm.all_reduce(x),
    lambda: comm.all_reduce(x, async_op=True).wait(),
    lambda: comm.send(x, there),
    lambda: comm.recv(x, there),
    comm.barrier,
    comm.dup,
):
    try:
        call()
        texts.append("nothing was raised")
    except pycoll.CollError as error:
        texts.append(str(error))
comm.close()  # and `idle` at the end of the process
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(texts))

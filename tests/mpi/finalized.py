"""``python finalized.py FOLDER LEVEL [HOSTS]``: MPI ends before communicators are closed.

LEVEL is the thread level that MPI is asked for; HOSTS has the number of each rank's host, if they
are on several. What calls said after that is written to FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import mpi4py
import numpy as np

mpi4py.rc.thread_level = sys.argv[2]

from mpi4py import MPI  # noqa: E402

import pycoll  # noqa: E402
from pycoll.testing import on_hosts  # noqa: E402

if sys.argv[3:]:
    comm = on_hosts(json.loads(sys.argv[3]), MPI.COMM_WORLD.Dup(), timeout_s=20)
else:
    comm = pycoll.init(transport="mpi", timeout=20)
idle = comm.dup()
rank, there = comm.rank, comm.rank ^ comm.world_size // 2
x = np.ones(10)
comm.all_reduce(x)
pending = []
if MPI.Query_thread() < MPI.THREAD_MULTIPLE and rank == 0:  # so they cannot be done
    pending = [other.all_reduce(x, async_op=True) for other in (comm, idle)]
message = comm.irecv(np.empty(10), there, tag=1)  # which nobody sends
MPI.Finalize()
texts = []
for call in (
    lambda: message.done() and message.wait(),
    *(work.wait for work in pending[:1]),
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

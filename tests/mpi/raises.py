"""``python raises.py FOLDER`` on every rank: rank 0 ends by an exception, with a call in flight.

The others write to FOLDER/RANK.json what they hear of it.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import pycoll
from pycoll.testing import on_hosts

comm = on_hosts([0, 0, 1])
comm.barrier()
if comm.rank == 0:
    work = comm.all_reduce(np.ones(20_000), async_op=True)
    time.sleep(0.3)
    raise ValueError("no more data")
try:
    comm.recv(np.empty(3), 0)
    text = "nothing was raised"
except pycoll.CollError as error:
    text = str(error)
Path(sys.argv[1], f"{comm.rank}.json").write_text(json.dumps(text))

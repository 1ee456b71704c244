"""``python absent.py FOLDER STEP``: rank 1 comes to a step when the others have given up.

STEP is ``init``, or ``card``, which is in the middle of it.
"""

import json
import os
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False  # the barrier of those who gave up is pending for ever

from mpi4py import MPI  # noqa: E402

import pycoll  # noqa: E402
from pycoll.runtime.startup import mpi  # noqa: E402

folder, world = Path(sys.argv[1]), MPI.COMM_WORLD
start = time.monotonic()
card = mpi.Card.own
if world.rank == 1 and sys.argv[2] == "init":
    time.sleep(4)
elif world.rank == 1:
    mpi.Card.own = lambda: (time.sleep(4), card())[1]
try:
    pycoll.init(timeout=1.5)
    found = ["nothing", "was raised"]
except pycoll.CollError as error:
    found = [type(error).__name__, str(error)]
path = folder / f"{world.rank}.json"
path.with_suffix(".new").write_text(json.dumps([*found, time.monotonic() - start]))
os.replace(path.with_suffix(".new"), path)
while not all((folder / f"{rank}.json").exists() for rank in range(world.size)):
    time.sleep(0.05)
os._exit(0)

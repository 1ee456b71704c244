"""``python settings.py FOLDER WHAT`` on every rank: start with what cannot be.

WHAT is a setting that rank 2 gives, or tells whether MPI was "never" initialised or is "no longer".
The text of the error is written to FOLDER/RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import mpi4py

folder, what = Path(sys.argv[1]), json.loads(sys.argv[2])
mpi4py.rc.initialize = what != "never"

from mpi4py import MPI  # noqa: E402

import pycoll  # noqa: E402

NAMES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
rank = next(int(os.environ[name]) for name in NAMES if name in os.environ)
if what == "no longer":
    MPI.Finalize()
options = what if isinstance(what, dict) and rank == 2 else {}
try:
    pycoll.init(**options)
    text = "nothing was raised"
except pycoll.CollError as error:
    text = str(error)
(folder / f"{rank}.json").write_text(json.dumps(text))

"""``python at_exit.py FOLDER HOSTS`` on every rank: handlers and finalizers communicate at the end.

HOSTS is "shared", or the number of the host of each rank. Every call adds a line to FOLDER/RANK.
"""

import atexit
import os
import sys
from pathlib import Path

import numpy as np


class Logger:
    def log(self):
        x = np.full(3, 1.0)
        total = self.comm.all_reduce(x)[0] + self.comm.all_reduce(x, async_op=True).wait()[0]
        os.write(self.file, f"{self.name} {total:g}\n".encode())

    def __del__(self):
        self.log()


before = Logger()
atexit.register(before.log)

import pycoll  # noqa: E402
from pycoll.testing import on_hosts  # noqa: E402

shared = sys.argv[2] == "shared"
before.name, before.comm = "handler", pycoll.init() if shared else on_hosts(eval(sys.argv[2]))
before.comm.all_reduce(np.ones(1), async_op=True)
path = Path(sys.argv[1]) / f"{before.comm.rank}"
before.file = os.open(path, os.O_CREAT | os.O_WRONLY)
last = Logger()
last.name, last.comm, last.file, last.me = "finalizer", before.comm.dup(), before.file, last

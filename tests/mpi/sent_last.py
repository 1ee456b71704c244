"""``python sent_last.py COUNT`` on two ranks: the sender ends without waiting for its receiver."""

import sys
import time

import numpy as np

import pycoll

count = int(sys.argv[1])
comm = pycoll.init(timeout=20, transport="mpi")
if comm.rank == 0:
    for tag in range(8):
        comm.isend(np.full(count, tag + 1.0), 1, tag)
else:
    time.sleep(0.3)
    for tag in reversed(range(8)):
        x = np.zeros(count)
        comm.recv(x, 0, tag)
        assert (x == tag + 1).all(), x

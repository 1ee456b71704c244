"""What the tests of a peer's death run: ``python deaths.py FOLDER HOSTS SIZE`` on every rank.

The last rank is killed while the others are inside a call with it. Whoever gets an error writes it
to FOLDER/RANK.json with the seconds it took, makes a communicator of those who are left where MPI
can, and uses it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False  # the dead would be waited for

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import pycoll  # noqa: E402
from pycoll.testing import on_hosts  # noqa: E402


def main():
    """Be killed, or survive."""
    folder, hosts, size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    comm = on_hosts(hosts, timeout_s=20)
    n, me = comm.world_size, comm.rank
    comm.barrier()
    if me == n - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    found, started = {}, time.monotonic()
    try:
        comm.all_reduce(np.ones(size))
    except pycoll.CollError as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - started
    if found.get("kind") == "PeerLost" and "shrink" in sys.argv:
        left = pycoll.from_mpi(MPI.COMM_WORLD.Shrink())
        found["sum"] = float(left.all_reduce(np.ones(1))[0])
    path = folder / f"{me}.json"
    path.with_suffix(".new").write_text(json.dumps(found))
    os.replace(path.with_suffix(".new"), path)
    time.sleep(0.5)  # let the others write too, before a launcher notices that this one has ended
    os._exit(0)


if __name__ == "__main__":
    main()

"""One rank of failures.py: does what the case says, and writes down how it ended."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

ODD = 1  # the rank that differs
WAIT_S = 5.0  # time limit of a call, where a library has one


def pycoll_calls(transport=None):
    """Return rank, all_reduce(x, op) and broadcast(x, root), all in place."""
    import pycoll

    comm = pycoll.init(timeout=WAIT_S, transport=transport, tuning="off")
    return (
        comm.rank,
        lambda x, op: comm.all_reduce(x, op=op, out=x),
        lambda x, root: comm.broadcast(x, root=root),
    )


def mpi_calls():
    """Return the same of whatever MPI mpi4py finds; it raises what MPI returns as an error."""
    from mpi4py import MPI

    comm, ops = MPI.COMM_WORLD, {"sum": MPI.SUM, "max": MPI.MAX}
    return (
        comm.rank,
        lambda x, op: comm.Allreduce(MPI.IN_PLACE, x, ops[op]),
        lambda x, root: comm.Bcast(x, root),
    )


def gloo_calls():
    """Return the same of PyTorch's gloo."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, n = int(os.environ["COMPARE_RANK"]), int(os.environ["COMPARE_SIZE"])
    store = dist.FileStore(os.environ["COMPARE_STORE"], n)
    limit = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    return (
        rank,
        lambda x, op: dist.all_reduce(torch.from_numpy(x), ops[op]),
        lambda x, root: dist.broadcast(torch.from_numpy(x), root),
    )


CALLS = {
    "pycoll": pycoll_calls,
    "pycoll over MPICH": lambda: pycoll_calls("mpi"),
    "pycoll over Open MPI": lambda: pycoll_calls("mpi"),
    "MPICH": mpi_calls,
    "Open MPI": mpi_calls,
    "gloo": gloo_calls,
}


def differ(case, odd, all_reduce, broadcast):
    """Make the call of a case, in which rank `ODD` does something else."""
    x = np.arange(1000, dtype=np.float32)
    usual = lambda: all_reduce(x, "sum")  # noqa: E731
    what, other = {
        "number of elements": (usual, lambda: all_reduce(x[:10], "sum")),
        "data type": (usual, lambda: all_reduce(x.astype(np.int32), "sum")),
        "operation": (usual, lambda: all_reduce(x, "max")),
        "root": (lambda: broadcast(x, 0), lambda: broadcast(x, ODD)),
        "collective": (usual, lambda: broadcast(x, 0)),
        "killed": (usual, lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "exits": (usual, lambda: sys.exit(0)),
        "never comes": (usual, lambda: time.sleep(3600)),
    }[case]
    other() if odd else what()


def main():
    """Make the call, and write the outcome, but for a rank that was to be late or gone."""
    case, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rank, all_reduce, broadcast = CALLS[name]()
    all_reduce(np.ones(4, np.float32), "sum")  # everybody is there
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    outcome, start = {"error": None}, time.monotonic()
    try:
        differ(case, rank == ODD, all_reduce, broadcast)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    outcome["seconds"] = round(time.monotonic() - start, 3)
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    time.sleep(3600)  # whoever ends shall not be the reason of what others get


if __name__ == "__main__":
    main()

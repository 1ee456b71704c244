"""What the tests of groups under an MPI launcher run: ``torch_mpi_program.py FOLDER NAME``.

Every rank takes itself to be on a host of its own, and writes to the folder what it has found.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pycoll.torch  # noqa: F401 - registers the backend
from pycoll.runtime.sessions import mpi_jobs
from worlds_torch import take_host

LIMIT = timedelta(seconds=15)


def init(backend, limit=LIMIT):
    """Meet at a store that does not end with rank 0."""
    rank, n = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(str(Path(sys.argv[1]) / "store"), n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=limit)


def beside_gloo(rank, n):
    """Make a group of a part of the ranks, when nobody has used MPI before."""
    init("gloo")
    group = dist.new_group([0, 1], backend="pycoll", timeout=LIMIT)
    found = ""
    if rank < 2:
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
        found = group._caller.session.transport
    dist.barrier()
    return found


def all_ranks(rank, n):
    """Make a group of all ranks."""
    init("pycoll")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == n).all()
    return dist.group.WORLD._caller.session.transport


def again(rank, n):
    """Make groups of the same ranks; return how many communicators of MPI that took."""
    made, create = [], mpi_jobs.create_group

    def counting(*given):
        made.append(given)
        return create(*given)

    mpi_jobs.create_group = counting
    all_ranks(rank, n)
    kept = [dist.new_group(list(range(n)), timeout=LIMIT, backend="pycoll") for _ in range(2)]
    for i in range(5):
        group = dist.new_group(list(range(n)), timeout=LIMIT, backend="pycoll")
        works = []
        for factor, each in enumerate((group, *kept), 1):  # their messages are under way together
            x = torch.full((20_000,), float(factor + i))
            works.append((dist.all_reduce(x, group=each, async_op=True), x, n * (factor + i)))
        for work, x, want in reversed(works):
            work.wait()
            assert (x == want).all()
        dist.destroy_process_group(group)
    return len(made)


def late(rank, n):
    """Let rank 1 stop for a while when a communicator is made."""
    create = mpi_jobs.create_group
    if rank == 1:
        mpi_jobs.create_group = lambda *given: (time.sleep(6), create(*given))[1]
    start = time.monotonic()
    try:
        init("pycoll", timedelta(seconds=2))
        text = "made"
    except dist.DistBackendError as error:
        text = str(error)
    return [text, time.monotonic() - start]


def refused(rank, n):
    """Let MPI have no more communicators."""
    from mpi4py import MPI

    def create(*given):
        raise MPI.Exception(MPI.ERR_OTHER)

    mpi_jobs.create_group = create
    try:
        return all_ranks(rank, n)
    except dist.DistBackendError as error:
        return str(error)


def main():
    folder, name = sys.argv[1:]
    if "RANK" not in os.environ:  # else torchrun has said all of it
        rank, size = (
            os.environ.get(f"PMI_{word}") or os.environ[f"OMPI_COMM_WORLD_{word}"]
            for word in ("RANK", "SIZE")
        )
        os.environ |= {"RANK": rank, "WORLD_SIZE": size}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    take_host(rank)
    found = globals()[name](rank, size)
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(found))
    os.replace(path.with_suffix(".new"), path)
    while not all((Path(folder) / f"{r}.json").exists() for r in range(size)):
        time.sleep(0.05)
    os._exit(0)  # where a rank has given up, MPI_Finalize would wait


if __name__ == "__main__":
    main()

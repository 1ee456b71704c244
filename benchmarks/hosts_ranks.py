"""The ranks of hosts.py: pycoll's all-reduce and the MPI's own, in turns."""

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import pycoll

TURNS = 3


def counted(link):
    """Return the bytes that have left this host."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def timed(world, call, budget_s, link):
    """Return the median seconds of the slowest rank, and bytes a call out of the busiest host."""
    call()
    world.Barrier()
    start = time.perf_counter()
    call()
    once = world.allreduce(time.perf_counter() - start, MPI.MAX)
    iters = int(min(max(budget_s / max(once, 1e-9), 3), 200))
    spent = np.empty(iters)
    world.Barrier()
    time.sleep(0.05)
    before = counted(link)
    for i in range(iters):
        start = time.perf_counter()
        call()
        spent[i] = time.perf_counter() - start
    world.Barrier()
    time.sleep(0.05)
    sent = world.allreduce(counted(link) - before, MPI.MAX) / iters
    slowest = np.empty_like(spent)
    world.Allreduce(spent, slowest, MPI.MAX)
    return float(np.median(slowest)), sent


def stream(world, hosts, x):
    """Return a call that exchanges with the same rank of the other host what a link must carry.

    No all-reduce is faster than this: the MPI's own messages, both ways, nothing combined.
    """
    half, count = world.size // hosts, x.size // (world.size // hosts)
    other = (world.rank + half) % world.size
    mine, theirs = x[:count].copy(), np.empty(count, x.dtype)
    return lambda: world.Sendrecv(mine, other, recvbuf=theirs, source=other)


def cases_of(comm, hosts, nbytes):
    """Return for every collective a call, its result, and vectors that leave all hosts.

    Formulas are those of docs/mpi.md, summed over hosts of equally many ranks.
    """
    n, me = comm.world_size, comm.rank
    count = nbytes // 4 // n  # elements of a block
    whole = np.arange(n * count, dtype=np.float32) % 997
    mine = whole.reshape(n, count)[me]
    total = whole * n + n * (n - 1) / 2
    table = (np.arange(n)[:, None] * n + me).astype(np.float32).repeat(count, 1).reshape(-1)
    rows = (me * n + np.arange(n))[:, None].astype(np.float32).repeat(count, 1).reshape(-1)
    root, others = n - 1, hosts - 1
    x = whole + np.float32(me)
    given = whole * np.float32(me == root)
    at_root = lambda y: y if me == root else None  # noqa: E731
    return {
        "all_reduce": (lambda: comm.all_reduce(x), total, 2 * others),
        "reduce": (lambda: comm.reduce(x, root=root), at_root(total), others),
        "broadcast": (lambda: comm.broadcast(given, root=root), whole, others),
        "all_gather": (lambda: comm.all_gather(mine), whole, others),
        "reduce_scatter": (lambda: comm.reduce_scatter(x), total.reshape(n, count)[me], others),
        "all_to_all": (lambda: comm.all_to_all(rows), table, n - n // hosts),
        "gather": (lambda: comm.gather(mine, root=root), at_root(whole), others / hosts),
        "scatter": (lambda: comm.scatter(whole, root=root), mine, others / hosts),
    }


def every_collective(comm, world, hosts, link, nbytes=1 << 20):
    """Check every collective, and compare the bytes that leave all hosts with the formula."""
    n, me, found = comm.world_size, comm.rank, []
    nbytes -= nbytes % (4 * n)
    for name, (call, want, vectors) in cases_of(comm, hosts, nbytes).items():
        got = call()
        if (want is not None or got is not None) and not np.array_equal(got, want):
            raise SystemExit(f"wrong result of {name} on rank {me}")
        world.Barrier()
        time.sleep(0.05)
        before = counted(link)
        call()
        world.Barrier()
        time.sleep(0.05)
        once = me % (n // hosts) == 0  # one rank of every host counts
        sent = world.allreduce((counted(link) - before) * once)
        found.append({"name": name, "sent": sent, "formula": vectors * nbytes})
    return found


def main():
    out, link, hosts, budget_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    world = MPI.COMM_WORLD
    comm = pycoll.init(timeout=120)
    n, rows = comm.world_size, []
    for nbytes in map(int, sys.argv[5].split(",")):
        count = nbytes // 4
        x = np.arange(count, dtype=np.float32) % 1000 + comm.rank
        mine, own = np.empty_like(x), np.empty_like(x)
        want = (np.arange(count, dtype=np.float32) % 1000) * n + n * (n - 1) / 2
        takes = {"pycoll": [], "own": []}
        calls = {
            "pycoll": lambda x=x, mine=mine: comm.all_reduce(x, out=mine),
            "own": lambda x=x, own=own: world.Allreduce(x, own, MPI.SUM),
        }
        if hosts == 2 and count >= n:
            calls["stream"] = stream(world, hosts, x)
            takes["stream"] = []
        for _ in range(TURNS):
            for name, call in calls.items():
                takes[name].append(timed(world, call, budget_s / TURNS, link))
        if not (np.array_equal(mine, want) and np.array_equal(own, want)):
            raise SystemExit(f"wrong result at {nbytes} bytes")
        row = {"nbytes": nbytes, "transport": comm.transport}
        for name, found in takes.items():
            seconds, sent = sorted(found)[TURNS // 2]
            row |= {f"{name}_us": seconds * 1e6, f"{name}_bytes": sent}
        rows.append(row)
    collectives = every_collective(comm, world, hosts, link)
    if comm.rank == 0:
        name, version = MPI.get_vendor()
        label = f"{name} {'.'.join(map(str, version))}"
        document = {"mpi": label, "rows": rows, "collectives": collectives}
        Path(out).write_text(json.dumps(document))
    comm.close()


if __name__ == "__main__":
    main()

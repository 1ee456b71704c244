"""What the tests of MPI run: ``python programs.py FOLDER NAME [HOSTS]`` on every rank.

NAME may be several names with commas. The functions of these names get the communicator; what they
return is written to FOLDER/RANK.json, by name.
"""

import json
import os
import sys
import time
from pathlib import Path

import checks
import failures
import later
import making
import numpy as np
import shortages
import unreceived
import waiters
import wrapping

import oracle
import pycoll
from cases import MOVING, REDUCING, make, run_cases
from pycoll.algorithms import ALGORITHMS
from pycoll.runtime.calls import plans as sizes
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.testing import on_hosts

PROGRAMS = {
    function.__name__: function
    for module in (failures, checks, later, making, shortages, unreceived, waiters, wrapping)
    for function in module.ALL
}


def program(function):
    """Make a function runnable by name."""
    PROGRAMS[function.__name__] = function
    return function


@program
def transport(comm):
    return type(comm._session).__name__


@program
def collectives(comm):
    """Run every collective on every size at which an off-by-one would show."""
    n = comm.world_size
    sizes = sorted({0, 1, 2, n - 1, n, n + 1, 17, 1000, 4097, 70_001})
    cases = [
        make(collective, "float32", n, size, memory=memory)
        for collective in REDUCING + MOVING
        for memory in ("new", "out", "misaligned")
        for size in sizes
    ]
    cases += [
        make(collective, "float32", n, size, memory="in_place")
        for collective in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
        for size in sizes
    ]
    return run_cases(comm, cases)


@program
def roots(comm):
    n = comm.world_size
    rooted = [name for name in REDUCING + MOVING if COLLECTIVES[name].rooted]
    cases = [
        make(c, "int32", n, size, root=r) for c in rooted for r in range(n) for size in (5, 9000)
    ]
    return run_cases(comm, cases)


@program
def types(comm):
    n = comm.world_size
    cases = [
        make(collective, name, n, size, op=op)
        for collective, size in (("all_reduce", 67), ("reduce_scatter", 5), ("reduce", 33))
        for name in oracle.DTYPES
        for op in oracle.ops(name)
    ]
    return run_cases(comm, cases)


@program
def orders(comm):
    """Run reductions in pinned orders, small and in segments: the bits are those of the oracle."""
    n = comm.world_size
    wrong = []
    for order in ("tree", "rank"):
        cases = [
            make(collective, name, n, size, order=order, op=op)
            for collective in REDUCING
            for name in oracle.FLOATS
            for op in ("sum", "avg")
            for size in (3, 5000, 600_000 // n)
        ]
        for case in cases:
            case.options["order"] = order
        wrong += run_cases(comm, cases)
    return wrong


@program
def subtrees(comm):
    """Sum floats of all sizes, up to many slices: bits of the tree, and of messages between all."""
    n, wrong = comm.world_size, []
    for dtype in (np.float32, np.float64):
        for size in (1, 7, 500, 513, 16_384, 16_385, 300_001, 1_200_000):
            xs = [np.random.default_rng([r, size]).standard_normal(size) for r in range(n)]
            mine = xs[comm.rank].astype(dtype)
            want = comm.all_reduce(mine, algorithm="halving_doubling")
            total = oracle.reduce([x.astype(dtype) for x in xs], "sum")
            wrong += [("tree", size)] * (want.tobytes() != total.tobytes())
            same = mine.copy()
            comm.all_reduce(same, out=same)
            for got in (comm.all_reduce(mine), same):
                wrong += [("sum", size)] * (got.tobytes() != want.tobytes())
            mean = comm.all_reduce(mine, "avg")
            other = comm.all_reduce(mine, "avg", algorithm="halving_doubling")
            wrong += [("avg", size)] * (mean.tobytes() != other.tobytes())
    return [comm._session.topology.nests, wrong]


@program
def segments(comm):
    """Reduce chunks of several messages each, on some ranks in place: the bits stay the same."""
    n, me = comm.world_size, comm.rank
    wrong = []
    kept = sizes._SEGMENT_BYTES
    for order, sizes._SEGMENT_BYTES in (("tree", 64 << 10), ("rank", 256 << 10)):
        cases = [
            make(collective, "float32", n, size, order=order, memory=memory)
            for collective in REDUCING
            for size in (200_001, 200_001 * n + 3)
            for memory in ("out", "in_place" if me % 2 else "out")
        ]
        for case in cases:
            case.options["order"] = order
        with comm.dup() as fresh:  # which has bound no call yet
            wrong += run_cases(fresh, cases)
    sizes._SEGMENT_BYTES = kept
    return wrong


@program
def segments_of_all(comm):
    """Some ranks work in place, and some need more slots: all cut their messages alike."""
    n, me, wrong = comm.world_size, comm.rank, []
    count, everyone = 3 << 18, set(range(n))
    ones = np.ones(n * count, np.float32)
    for in_place in ({0}, everyone - {0}, everyone, set()):
        x = ones * (me + 1)
        out = x[count * me : count * (me + 1)] if me in in_place else None
        got = comm.reduce_scatter(x, out=out, algorithm="halving")
        wrong += [] if (got == n * (n + 1) / 2).all() else [f"reduce_scatter {in_place}"]
        x = ones * (me + 1)
        got = comm.exscan(x, out=x if me in in_place else None, algorithm="doubling")
        wrong += [] if (got == me * (me + 1) / 2).all() else [f"exscan {in_place}"]
    x = np.full(5 << 20, me + 1, np.int32)
    got = comm.reduce(x, root=1)
    right = me != 1 or (got == n * (n + 1) // 2).all()
    return wrong if right else [*wrong, "reduce"]


@program
def algorithms(comm):
    """Run every algorithm by name on few, some and many bytes."""
    n = comm.world_size
    wrong = []
    for entry in ALGORITHMS:
        if entry.worlds(n):
            order = entry.order if entry.order in ("tree", "rank") else "tree"
            cases = [
                make(entry.collective, "int64", n, size, order=order, algorithm=entry.name)
                for size in (3, 2500, 90_000)
            ]
            wrong += run_cases(comm, cases)
    return wrong


@program
def variants(comm):
    """Run the v-variants with blocks of 0 to many rows."""
    n, me = comm.world_size, comm.rank
    counts = [(7 * r) % 5 * 900 for r in range(n)]
    parts = [
        np.arange(c * 2, dtype=np.float64).reshape(c, 2) + 1000 * r for r, c in enumerate(counts)
    ]
    joined = np.concatenate(parts)
    ends = np.cumsum(counts)
    mine = slice(int(ends[me] - counts[me]), int(ends[me]))
    wrong = [oracle.differences(comm.all_gather_v(parts[me]), joined)]
    for root in range(n):
        got = comm.gather_v(parts[me], root)
        wrong.append(oracle.differences(got, joined) if me == root else got or "")
        x = joined if me == root else np.empty((1, 2))
        wrong.append(oracle.differences(comm.scatter_v(x, counts, root), joined[mine]))
    whole = [np.full((sum(counts), 2), r + 1.0) for r in range(n)]
    want = oracle.reduce(whole, "sum")[mine]
    wrong.append(oracle.differences(comm.reduce_scatter_v(whole[me], counts), want))
    table = np.arange(n * n).reshape(n, n) % 4 * 700
    rows = np.arange(table[me].sum()) + 100_000 * me
    first = np.cumsum(table, axis=1) - table
    want = np.concatenate([np.arange(table[r, me]) + first[r, me] + 100_000 * r for r in range(n)])
    wrong.append(oracle.differences(comm.all_to_all_v(rows, table[me].tolist()), want))
    return [line for line in wrong if line]


@program
def messages(comm):
    """Tagged messages: any order, any source, small and large, to oneself."""
    n, me = comm.world_size, comm.rank
    for size in (0, 3, 5000, 400_000):
        after, before = (me + 1) % n, (me - 1) % n
        comm.send(np.full(size, me), after, tag=1)
        comm.send(np.full(size, me + 100), after, tag=2)
        second, first = np.empty(size, int), np.empty(size, int)
        assert comm.recv(second, before, tag=2) == before
        assert comm.recv(first, tag=1) == before
        assert (first == before).all()
        assert (second == before + 100).all()
        comm.barrier()
    if n > 1 and me < 2:
        if me:
            comm.send(np.ones(3), 0)
        else:
            try:
                comm.recv(np.empty(4), 1)
                raise AssertionError("a message of another size was received")
            except pycoll.MismatchError:
                comm.recv(np.empty(3), 1)
        try:
            comm.recv(np.empty(3), timeout=0.2)
            raise AssertionError("received what nobody has sent")
        except pycoll.CollTimeout:
            pass
    return float(comm.all_reduce(np.ones(1))[0])


@program
def background(comm):
    """Queue calls and wait for them in another order; blocking calls come behind."""
    n, me = comm.world_size, comm.rank
    arrays = [np.full(size, float(me)) for size in (3, 20_000, 500_000)]
    works = [comm.all_reduce(x, async_op=True) for x in arrays]
    last = comm.all_gather(np.array([me]))
    until = time.monotonic() + 20
    while not works[-1].done() and time.monotonic() < until:
        pass
    sums = [float(work.wait()[0]) for work in reversed(works)]
    return [sums == [n * (n - 1) / 2] * 3, last.tolist() == list(range(n))]


@program
def groups(comm):
    """Split, duplicate, and split again; all of them at work."""
    n, me = comm.world_size, comm.rank
    twin = comm.dup()
    half = comm.split(me % 2, key=-me)
    none = comm.split(None if me == 0 else 1)
    assert (none is None) == (me == 0)
    ranks = half.all_gather(np.array([me])).tolist()
    want = [r for r in range(n) if r % 2 == me % 2][::-1]
    small = half.split(half.rank // 2)
    inner = small.all_reduce(np.array([1]))[0]
    totals = [float(c.all_reduce(np.ones(20_000))[0]) for c in (comm, twin, half)]
    for c in (small, half, twin):
        c.close()
    return [ranks == want, totals == [n, n, len(want)], int(inner) == small_size(want, me)]


def small_size(members, me):
    """Return how many ranks the inner half of a half has."""
    pair = members.index(me) // 2
    return len(members[2 * pair : 2 * pair + 2])


@program
def cores(comm):
    """Bind every rank to a core of its own, and use a group of one host; return what it knows."""
    allowed, place = os.sched_getaffinity(0), comm.rank % 2
    os.sched_setaffinity(0, [sorted(allowed)[place % len(allowed)]])
    try:
        again = on_hosts([0, 0, 1])
        host = again.split(0 if comm.rank < 2 else 1)
        total = host.all_reduce(np.ones(4096, np.float32))
        return [*host._session.sharing, host._session.plans.crowded, float(total[-1])]
    finally:
        os.sched_setaffinity(0, allowed)


@program
def plans(comm):
    x = np.arange(6000.0) + comm.rank
    plan = comm.plan("all_reduce", x, "max")
    got = [plan(x), plan(x + 1, out=x)]
    top = np.arange(6000.0) + comm.world_size - 1
    return [oracle.differences(g, w) for g, w in zip(got, (top, top + 1), strict=True)]


def main():
    """Run programs."""
    folder, names, *hosts = sys.argv[1:]
    with on_hosts(json.loads(hosts[0])) if hosts else pycoll.init() as comm:
        result = {name: PROGRAMS[name](comm) for name in names.split(",")}
        path = Path(folder) / f"{comm.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(result))
        os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    main()

"""Every collective against its NumPy definition: types, operations, sizes, worlds, memory."""

import numpy as np
import pytest

import oracle
from cases import (
    IN_PLACE,
    MOVING,
    PRIVATE,
    PROCESSES,
    REDUCING,
    ROOTED,
    SMALL_CELLS,
    SYMMETRIC,
    SYMMETRIC_INPUT,
    THREADS,
    WORLDS,
    check,
    make,
)
from pycoll import _C
from pycoll.algorithms import ALGORITHMS
from pycoll.config import Config
from pycoll.schedule.ir import Algorithm
from pycoll.testing import run_processes, run_threads
from samples import sample

COLLECTIVES = REDUCING + MOVING
GIB = 1 << 30


def sizes(n):
    """Return numbers of elements where an off-by-one would show."""
    return sorted({0, 1, 2, 3, n - 1, n, n + 1, 17, 1000, 4097})


def memories(collective):
    """Return the kinds of memory in which a collective works."""
    kinds = PRIVATE + SYMMETRIC + SYMMETRIC_INPUT
    return kinds if collective in IN_PLACE else [k for k in kinds if "in_place" not in k]


SOME = [("threads", 1), ("threads", 3), ("threads", 8), ("processes", 2), ("processes", 3)]


@pytest.mark.parametrize("world", sample(WORLDS, SOME), ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sizes_and_memory(world, collective):
    n = world[1]
    cases = [
        make(collective, "float32", n, size, memory=memory)
        for memory in memories(collective)
        for size in sizes(n)
    ]
    check(world, cases)


@pytest.mark.parametrize("world", sample(WORLDS, SOME), ids=str)
def test_types_and_operations(world):
    n = world[1]
    cases = [
        make(collective, name, n, size, op=op, memory=memory)
        for collective, size in (("all_reduce", 67), ("reduce_scatter", 5), ("reduce", 33))
        for name in oracle.DTYPES
        for op in oracle.ops(name)
        for memory in ("new", "symmetric", "symmetric_input")
    ]
    cases += [
        make(collective, name, n, 65, memory="misaligned")
        for collective in MOVING
        for name in oracle.DTYPES
    ]
    check(world, cases)


@pytest.mark.parametrize("world", [("threads", 5), ("processes", 3)], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("config", [None, SMALL_CELLS], ids=["cells", "small_cells"])
def test_many_segments(world, collective, config):
    cases = [
        make(collective, name, world[1], 100_003, memory=memory)
        for name, memory in [("float32", "new"), ("uint8", "misaligned"), ("float64", "symmetric")]
    ]
    check(world, cases, config)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_root(world):
    n = world[1]
    cases = [
        make(collective, "int32", n, size, root=root, memory=memory)
        for collective in ROOTED
        for root in range(n)
        for size in (1, 13, 700)
        for memory in ("new", "out", "symmetric")
    ]
    check(world, cases)


def algorithm_cases(entry, n):
    """Return calls that name an algorithm; the data shows the order if the algorithm pins it."""
    pinned = entry.order in ("tree", "rank")
    data = oracle.random if pinned else oracle.exact
    in_place = ["in_place", "symmetric_in_place"] if entry.collective in IN_PLACE else []
    some = range(n) if n < 5 else sample(range(n), (0, n // 2, n - 1))
    roots = some if "root" in entry.params else [None]
    return [
        make(
            entry.collective,
            name,
            n,
            size,
            data=data,
            memory=memory,
            order=entry.order,
            algorithm=entry.name,
            **({} if root is None else {"root": root}),
        )
        for root in roots
        for name, size in [("float64", 0), ("int8", 1), ("float64", n + 1), ("float32", 2500)]
        for memory in ["new", "symmetric", *SYMMETRIC_INPUT, *in_place]
    ]


def algorithm_worlds():
    """Yield algorithms with worlds of threads, and of processes by turns."""
    for i, entry in enumerate(ALGORITHMS):
        for world in THREADS + sample(PROCESSES, PROCESSES[i % len(PROCESSES) :][:1]):
            if entry.worlds(world[1]):
                yield entry, world


@pytest.mark.parametrize(
    ("entry", "world"),
    list(algorithm_worlds()),
    ids=lambda x: f"{x.collective}-{x.name}" if isinstance(x, Algorithm) else str(x),
)
def test_every_algorithm(entry, world):
    check(world, algorithm_cases(entry, world[1]))


@pytest.mark.parametrize("entry", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}")
def test_every_algorithm_in_segments(entry):
    n = next(filter(entry.worlds, (3, 6, 4)))
    cases = [
        make(
            entry.collective,
            "float32",
            n,
            20_011,
            data=oracle.random if entry.order in ("tree", "rank") else oracle.exact,
            memory=memory,
            order=entry.order,
            algorithm=entry.name,
        )
        for memory in ("new", "symmetric")
    ]
    check(("threads", n), cases, SMALL_CELLS)


@pytest.mark.parametrize("world", [("threads", 3), ("processes", 2)], ids=str)
def test_shapes(world):
    n = world[1]
    shapes = [(2, 3, 4), (1, 1), (5, 0), (0, 7), (3, 1, 2, 2)]
    cases = [
        make(collective, "float32", n, shape, memory=memory)
        for collective in COLLECTIVES
        for shape in shapes
        for memory in ("new", "out", "symmetric")
    ]
    cases += [
        make(collective, "float64", n, (), memory=memory)
        for collective in ("all_reduce", "reduce", "broadcast", "all_gather", "gather")
        for memory in ("new", "out")
    ]
    check(world, cases)


def test_scatter_needs_no_input_off_the_root(run):
    def rank(comm):
        full = np.arange(6, dtype=np.int16)
        mine = np.empty(2, np.int16)
        comm.scatter(full if comm.rank == 1 else None, root=1, out=mine)
        like = comm.scatter(full if comm.rank == 1 else np.empty(6, np.int16), root=1)
        return mine.tolist(), like.tolist()

    assert run(3, rank) == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]


def test_barrier_waits_for_all():
    def rank(comm):
        flags = comm.empty(1, np.int32)
        comm.barrier()
        flags[0] = 1
        assert comm.barrier() is None
        return int(comm.all_reduce(flags)[0])

    assert run_processes(4, rank) == [4] * 4


def test_more_calls_than_the_iteration_counter_holds():
    def rank(comm):
        x = np.array([comm.rank], np.int64)
        return sum(int(comm.all_reduce(x)[0]) != 1 for _ in range(66_000))

    assert run_processes(2, rank, timeout=60) == [0, 0]


@pytest.mark.parametrize("world", [("threads", 8), ("processes", 6)], ids=str)
def test_more_ranks_than_cores(world):
    cases = [make(c, "float32", world[1], k) for c in COLLECTIVES for k in (1, 300)] * 10
    check(world, cases)


def test_many_ranks():
    check(("threads", 32), [make(c, "int32", 32, 3) for c in COLLECTIVES])


def test_equal_bits_on_all_ranks_in_any_order(run):
    def rank(comm):
        x = np.random.default_rng(comm.rank).standard_normal(5001).astype(np.float32)
        return [comm.all_reduce(x, order=o).tobytes() for o in ("any", "tree", "rank")]

    results = run(4, rank)
    assert all(result == results[0] for result in results)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    count = (1 << 31) + 7
    where = [0, (1 << 31) - 1, 1 << 31, -1]
    available = _C.available_memory()
    if available < 8 * GIB:
        pytest.skip(f"needs 8 GiB of memory, {available / GIB:.1f} are available")

    def rank(comm):
        x = np.zeros(count, np.int8)
        x[where] = [1, 2, 3, 40 + comm.rank]
        comm.all_reduce(x, out=x)
        return x[where].tolist(), int(np.count_nonzero(x))

    config = Config(timeout_s=60)
    assert run_processes(2, rank, timeout=90, config=config) == [([2, 4, 6, 81], 4)] * 2


def test_threads_and_processes_agree():
    def rank(comm):
        x = np.random.default_rng(comm.rank).standard_normal(999)
        return comm.all_reduce(x).tobytes()

    assert run_threads(3, rank) == run_processes(3, rank)

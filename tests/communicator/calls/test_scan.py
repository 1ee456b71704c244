"""Prefix reductions against the oracle: every type and operation, orders, algorithms, places."""

import numpy as np
import pytest

import cases
import oracle
from pycoll.algorithms import names
from pycoll.config import Config
from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.testing import run_threads

PREFIX = ["scan", "exscan"]


@pytest.mark.parametrize(
    "world", [("threads", 1), ("threads", 4), ("threads", 5), ("processes", 3)]
)
def test_every_type_and_operation(world):
    todo = [
        cases.make(name, dtype, world[1], 7, data=oracle.exact, order="rank", op=op)
        for name in PREFIX
        for dtype in oracle.DTYPES
        for op in oracle.ops(dtype)
        if op != "avg"
    ]
    cases.check(world, todo)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_orders_sizes_and_places(n):
    places = ["new", "out", "in_place", "misaligned", "symmetric", "symmetric_in_place"]
    todo = [
        cases.make(name, "float32", n, size, memory=place, order="rank")
        for name in PREFIX
        for size in (0, 1, 1000, 30_000)
        for place in places
    ]
    cases.check(("threads", n), todo, cases.SMALL_CELLS)


@pytest.mark.parametrize("name", PREFIX)
def test_every_algorithm(name):
    orders = {"direct": "tree", "direct_rank": "rank", "chain": "rank", "doubling": "tree"}
    todo = [
        cases.make(name, "float64", 5, 5000, algorithm=algorithm, order=orders[algorithm])
        for algorithm in names(name)
    ]
    cases.check(("threads", 5), todo, Config(timeout_s=10, cell_bytes=8192, heap_bytes=1 << 28))


def many(comm):
    """Call as often as it takes for calls to be remembered; rank 0 of an exscan never is."""
    got = []
    for call in range(4):
        x = np.arange(3.0) + comm.rank + call
        got.append((comm.scan(x).tolist(), comm.exscan(x, async_op=True).wait().tolist()))
    return got


def test_again_and_in_the_background():
    found = run_threads(3, many)
    for rank in range(3):
        for call in range(4):
            rows = [np.arange(3.0) + r + call for r in range(3)]
            below = sum(rows[:rank]) if rank else np.zeros(3)
            assert found[rank][call] == ((below + rows[rank]).tolist(), below.tolist())


def test_what_a_prefix_has_not():
    def ranks(comm):
        for name in PREFIX:
            with pytest.raises((ArgumentError, PeerRejected), match="op='avg' is not defined"):
                getattr(comm, name)(np.ones(2), "avg")
        with pytest.raises(MismatchError, match="field 'kind'"):
            comm.scan(np.ones(2)) if comm.rank else comm.exscan(np.ones(2))
        return True

    assert run_threads(2, ranks) == [True, True]

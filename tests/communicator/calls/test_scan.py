"""Prefix reductions against the oracle: every type and operation, orders, algorithms, places."""

import numpy as np
import pytest

import cases
import oracle
from pycoll.algorithms import names
from pycoll.config import Config
from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.runtime.selection.rules import FEW_N
from pycoll.testing import run_processes, run_threads
from without_python import without_python

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


def rounded_once(parts, dtype, op):
    """Return what each rank gets: the serial loop in float32, and each result rounded by itself."""
    wide = [part.astype(np.float32) for part in parts]
    combine = {"sum": np.add, "prod": np.multiply}[op]
    totals = [wide[0]]
    for part in wide[1:]:
        totals.append(combine(totals[-1], part))
    return [total.astype(dtype) for total in totals]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_over_many_ranks_results_of_few_bits_are_rounded_once(name):
    """So many ranks that not each of them folds the inputs of all below it."""
    n, dtype = FEW_N + 2, oracle.dtype(name)
    parts = [
        np.random.default_rng(rank).uniform(0.5, 1.5, 33).astype(np.float32).astype(dtype)
        for rank in range(n)
    ]
    want = {op: rounded_once(parts, dtype, op) for op in ("sum", "prod")}

    def ranks(comm):
        own, out = parts[comm.rank].copy(), np.empty(33, dtype)
        found = {op: comm.scan(own, op) for op in want}
        assert comm.scan(own, out=out) is out
        later = np.empty(33, dtype)
        work = [comm.scan(own, out=later, async_op=True), comm.exscan(own, async_op=True)]
        below = work[1].wait()
        assert work[0].done()
        assert np.array_equal(later.view(np.uint8), out.view(np.uint8))
        assert comm.scan(own, "max", order="tree").dtype == dtype
        same = own.copy()
        comm.scan(same, out=same)
        assert np.array_equal(same.view(np.uint8), out.view(np.uint8))
        return found, out, below

    for rank, (found, out, below) in enumerate(run_threads(n, ranks, timeout=120)):
        for op, results in want.items():
            assert found[op].tobytes() == results[rank].tobytes()
        assert out.tobytes() == want["sum"][rank].tobytes()
        want_below = want["sum"][rank - 1] if rank else np.zeros(33, dtype)
        assert below.tobytes() == want_below.tobytes()


def test_over_many_ranks_types_still_have_to_agree():
    """Both are made in float32."""

    def ranks(comm):
        with pytest.raises(MismatchError, match="dtype"):
            comm.scan(np.ones(3, np.float32 if comm.rank else np.float16))
        return True

    assert all(run_threads(FEW_N + 1, ranks, timeout=120))


OF_EVERY_TYPE = [(op, t) for op in ("sum", "prod", "min", "max") for t in ("f4", "i8", "u1")]


@pytest.mark.parametrize(("op", "dtype"), [*OF_EVERY_TYPE, ("sum", "c8"), ("and", "?")])
def test_an_exscan_like_an_earlier_one_needs_no_python(op, dtype):

    def ranks(comm):
        x = np.arange(1, 6).astype(dtype) + comm.rank
        out = np.empty_like(x)
        calls = [
            lambda: comm.exscan(x, op),
            lambda: comm.exscan(x, op, out=out).copy(),
            lambda: comm.exscan(x, op, async_op=True).wait(),
        ]
        first = [call() for call in calls]
        out[:] = 3
        with without_python(comm):
            again = [call() for call in calls]
        return np.array_equal(first, again) and (comm.rank > 0 or (again[0] == again[1]).all())

    assert all(run_processes(3, ranks))

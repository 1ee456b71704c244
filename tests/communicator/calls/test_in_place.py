"""Collectives whose input and output share memory, ordinary and symmetric, and mixtures."""

import numpy as np
import pytest

import oracle
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.testing import run_threads
from pycoll.types import Kind

MIB = 1 << 20
HEAP = Config(timeout_s=20, heap_bytes=64 * MIB)
COUNTS = [1, 701, 60_007]  # of a rank's share: below and above where calls become direct


def make(comm, symmetric, count, dtype=np.int64):
    """Return zeros."""
    return comm.zeros(count, dtype) if symmetric else np.zeros(count, dtype)


def inputs(n, count):
    """Return what each rank starts from."""
    return [np.arange(count, dtype=np.int64) * (r + 2) + r for r in range(n)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("n", [2, 3])
def test_a_block_of_the_other_array(run, n, count, symmetric):
    def rank(comm):
        full = make(comm, symmetric, n * count)
        mine = full[comm.rank * count : (comm.rank + 1) * count]
        blocks, vectors = inputs(n, count), inputs(n, n * count)
        for _ in range(3):
            full[:] = -1
            mine[:] = blocks[comm.rank]
            assert comm.all_gather(mine, out=full) is full
            assert (full == np.concatenate(blocks)).all()
            full[:] = vectors[comm.rank]
            comm.reduce_scatter(full, out=mine)
            assert (mine == oracle.expected("reduce_scatter", vectors)[comm.rank]).all()
        return True

    assert run(n, rank, config=HEAP) == [True] * n


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_some_ranks_exchange_in_place(run, count, symmetric):
    n = 3

    def rank(comm):
        x, other = (make(comm, symmetric, n * count) for _ in range(2))
        vectors = inputs(n, n * count)
        want = oracle.expected("all_to_all", vectors)[comm.rank]
        for call in range(4):
            x[:] = vectors[comm.rank]
            out = x if (comm.rank + call) % 2 else other
            comm.all_to_all(x, out=out)
            assert (out == want).all()
            assert out is x or (x == vectors[comm.rank]).all()
        return True

    assert run(n, rank, config=HEAP) == [True] * n


@pytest.mark.parametrize("order", ["tree", "rank", "any"])
@pytest.mark.parametrize("place", ["symmetric", "ordinary", "registered", "in place", "none"])
def test_the_root_of_a_reduction_chooses_where_the_result_goes(run, place, order):
    n, count = 3, 30_001

    def rank(comm):
        x = comm.empty(count, np.int64)
        want = sum(inputs(n, count))
        for root in range(n):
            x[:] = inputs(n, count)[comm.rank]
            out = {"symmetric": make(comm, True, count), "in place": x, "none": None}.get(
                place, np.zeros(count, np.int64)
            )
            if place == "registered":
                comm.register(out)
            out = out if comm.rank == root else None
            result = comm.reduce(x, root=root, out=out, order=order)
            if comm.rank == root:
                assert out is None or result is out
                assert (result == want).all()
            if result is not x:
                assert (x == inputs(n, count)[comm.rank]).all()
        return True

    assert run(n, rank, config=HEAP) == [True] * n


def test_what_works_on_the_arrays_themselves():
    def rank(comm):
        x, out = comm.empty(30_000, np.float32), comm.empty(30_000, np.float32)
        prepare = comm._session.prepare
        kinds = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.ALL_TO_ALL)
        roots = [k for k in kinds if k != Kind.REDUCE or comm.rank == 0]
        direct = [prepare(CallRequest(kind), x, out).binding.direct for kind in roots]
        mine = x[comm.rank * 15_000 : (comm.rank + 1) * 15_000]
        direct.append(prepare(CallRequest(Kind.ALL_GATHER), mine, x).binding.direct)
        direct.append(prepare(CallRequest(Kind.REDUCE_SCATTER), x, mine).binding.direct)
        direct.append(prepare(CallRequest(Kind.ALL_TO_ALL), x, x).binding.direct)
        return all(direct)

    assert run_threads(2, rank, config=HEAP) == [True, True]


@pytest.mark.parametrize("symmetric", [False, True])
def test_arrays_larger_than_any_cache(symmetric):
    """Results that the last cache cannot hold are stored past it; odd sizes, odd addresses."""
    n, count = 2, 17 * MIB + 13

    def rank(comm):
        x = make(comm, symmetric, n * count + 1, np.uint8)[1:]
        out = make(comm, symmetric, n * count + 3, np.uint8)[3:]
        part = slice(comm.rank * count, (comm.rank + 1) * count)
        both = [np.resize(np.arange(251, dtype=np.uint8) * k, n * count) for k in (1, 3)]
        x[:] = both[comm.rank]
        comm.all_gather(x[part], out=out)
        right = [(out[:count] == both[0][:count]).all(), (out[count:] == both[1][count:]).all()]
        comm.all_to_all(x, out=out)
        right += [(out[r * count : (r + 1) * count] == both[r][part]).all() for r in range(n)]
        comm.reduce_scatter(x, out=out[:count], op="max")
        right.append((out[:count] == np.maximum(*both)[part]).all())
        comm.reduce(x, root=1, out=out if comm.rank == 1 else None)
        right.append(comm.rank == 0 or (out == both[0] + both[1]).all())
        return all(right)

    config = Config(timeout_s=60, heap_bytes=192 * MIB)
    assert run_threads(n, rank, config=config) == [True] * n


IN_PLACE = {
    "all_reduce": lambda comm, full, mine: comm.all_reduce(full, out=full),
    "all_gather": lambda comm, full, mine: comm.all_gather(mine, out=full),
    "reduce_scatter": lambda comm, full, mine: comm.reduce_scatter(full, out=mine),
    "broadcast": lambda comm, full, mine: comm.broadcast(full, out=full),
    "six dimensions": lambda comm, full, mine: comm.all_reduce(full.reshape(6 * (2,))),
}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("call", IN_PLACE)
def test_equal_calls_are_prepared_once(run, call, symmetric):
    def rank(comm):
        session, n = comm._session, comm.world_size
        full = make(comm, symmetric, 64)
        mine = full[comm.rank * (64 // n) : (comm.rank + 1) * (64 // n)]
        prepare, prepared = session.prepare, []
        session.prepare = lambda *args: prepared.append(args) or prepare(*args)
        for _ in range(5):
            IN_PLACE[call](comm, full, mine)
        return len(prepared)

    assert run(2, rank, config=HEAP) == [1, 1]


def test_a_block_of_another_rank():
    """What was right for one place of the block is not taken for right at another."""

    def rank(comm):
        full = np.zeros(8)
        mine, other = (full[4 * r : 4 * r + 4] for r in (comm.rank, 1 - comm.rank))
        mine[:] = comm.rank
        for call in range(4):
            block = (mine, other)[call % 2]
            if call % 2:
                with pytest.raises(ArgumentError, match="overlap partly"):
                    comm.all_gather(block, out=full)
            else:
                comm.all_gather(block, out=full)
        return full.tolist()

    assert run_threads(2, rank) == [[0.0] * 4 + [1.0] * 4] * 2

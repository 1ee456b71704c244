"""The collectives whose blocks differ in size from rank to rank."""

import re

import numpy as np
import pytest

import oracle
from pycoll.errors import ArgumentError, MismatchError, PeerRejected
from pycoll.testing import run_threads

COUNTS = [
    [3, 3, 3],
    [0, 5, 1],
    [4, 0, 0],
    [0, 0, 0],
    [1, 2000, 7],
    [7, 1, 2, 0, 3],
    [2],
    [9000, 30_000],
]
TAILS = [(), (3,), (2, 5), (0,)]


def block(rank, rows, tail, dtype=np.int32):
    """Return rows that tell where they come from."""
    size = rows * int(np.prod(tail))
    return (np.arange(size) + 1000 * rank).astype(dtype).reshape(rows, *tail)


def bounds(counts):
    """Return a slice of rows for each rank."""
    ends = np.cumsum(counts)
    return [slice(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_gathering(counts, tail):
    n, parts = len(counts), [block(r, rows, tail) for r, rows in enumerate(counts)]
    joined = np.concatenate(parts)

    def rank(comm):
        part, results = parts[comm.rank], []
        out = np.empty_like(joined)
        assert comm.all_gather_v(part, out=out) is out
        results += [oracle.differences(r, joined) for r in (comm.all_gather_v(part), out)]
        for root in range(n):
            got = comm.gather_v(part, root)
            results.append(oracle.differences(got, joined) if comm.rank == root else got or "")
        got, rows = comm.all_gather_v(part, return_counts=True)
        assert rows.dtype == np.int64
        assert rows.tolist() == list(counts)
        results.append(oracle.differences(got, joined))
        got, rows = comm.gather_v(part, n - 1, return_counts=True)
        assert rows.tolist() == list(counts)
        results.append(oracle.differences(got, joined) if comm.rank == n - 1 else got or "")
        return results

    assert run_threads(n, rank) == [[""] * (4 + n)] * n


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_handing_out(counts, tail):
    n, whole = len(counts), block(1, sum(counts), tail)
    mine = bounds(counts)

    def rank(comm):
        results = []
        for root in range(n):
            x = whole if comm.rank == root else np.empty((1, *tail), whole.dtype)
            out = np.empty_like(whole[mine[comm.rank]])
            got = comm.scatter_v(x, counts, root)
            assert comm.scatter_v(x, counts, root, out=out) is out
            results += [oracle.differences(r, whole[mine[comm.rank]]) for r in (got, out)]
        return results

    assert run_threads(n, rank) == [[""] * 2 * n] * n


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("order", [None, "tree", "rank"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_reducing(counts, order, name):
    n, rng = len(counts), np.random.default_rng(5)
    parts = [oracle.random(rng, name, (sum(counts), 2)) for _ in range(n)]
    mine = bounds(counts)

    def rank(comm):
        results = []
        for op in ("sum", "max", "avg"):
            want = oracle.reduce(parts, op, order or "tree")[mine[comm.rank]]
            got = comm.reduce_scatter_v(parts[comm.rank], counts, op, order=order)
            results.append(oracle.differences(got, want))
        return results

    assert run_threads(n, rank) == [[""] * 3] * n


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_all_to_all(n, tail):
    table = np.random.default_rng(n).integers(0, 40, (n, n)) * (np.eye(n, k=1) == 0)
    table = table.astype(int)
    parts = [block(r, int(table[r].sum()), tail) for r in range(n)]

    def rank(comm):
        me = comm.rank
        want = np.concatenate([parts[r][bounds(table[r])[me]] for r in range(n)])
        out = np.empty_like(want)
        got = comm.all_to_all_v(parts[me], table[me].tolist())
        assert comm.all_to_all_v(parts[me], table[me], out=out) is out
        counted, rows = comm.all_to_all_v(parts[me], table[me], return_counts=True)
        assert rows.tolist() == table[:, me].tolist()
        return [oracle.differences(r, want) for r in (got, out, counted)]

    assert run_threads(n, rank) == [[""] * 3] * n


def test_processes_and_symmetric_memory(run):
    def rank(comm):
        rows = comm.rank * 4000 + 1
        x = comm.empty((rows, 2), np.float32)
        x[:] = comm.rank
        joined = comm.all_gather_v(x)
        back = comm.scatter_v(joined, [1, 4001, 8001], root=2)
        swapped = comm.all_to_all_v(x[:1], [int(comm.rank == r) for r in range(3)])
        return joined.shape[0], float(joined.sum()), float(back.sum()), swapped.tolist()

    total = 2.0 * (4001 + 2 * 8001)
    assert run(3, rank) == [(12_003, total, 2.0 * r * (r * 4000 + 1), [[r, r]]) for r in range(3)]


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x, out: comm.all_gather_v(x, out=out),
        lambda comm, x, out: comm.all_to_all_v(x, [1, 1], out=out),
        lambda comm, x, out: comm.reduce_scatter_v(x, [1, 1], out=out),
    ],
    ids=["all_gather_v", "all_to_all_v", "reduce_scatter_v"],
)
def test_overlapping_arrays(run, call):
    """What lies in both input and output is read before it is written."""

    def rank(comm):
        memory = np.arange(16.0).reshape(8, 2)
        want = call(comm, memory[:2].copy(), None)
        got = call(comm, memory[:2], memory[1 : 1 + len(want)])
        return oracle.differences(got, want)

    assert run(2, rank) == ["", ""]


ONE_RANK_IS_WRONG = {
    "sum of counts": lambda comm, bad: comm.all_to_all_v(np.ones(2), [1, 2] if bad else [1, 1]),
    "negative": lambda comm, bad: comm.all_to_all_v(np.ones(2), [3, -1] if bad else [1, 1]),
    "length of counts": lambda comm, bad: comm.scatter_v(np.ones(2), [2] if bad else [1, 1]),
    "floats": lambda comm, bad: comm.reduce_scatter_v(np.ones(2), [1.0, 1.0] if bad else [1, 1]),
    "operation": lambda comm, bad: comm.reduce_scatter_v(
        np.ones(2), [1, 1], "xor" if bad else "sum"
    ),
    "order": lambda comm, bad: comm.reduce_scatter_v(
        np.ones(2), [1, 1], order="random" if bad else "tree"
    ),
    "0-dimensional": lambda comm, bad: comm.all_gather_v(np.ones(()) if bad else np.ones(1)),
    "shape of out": lambda comm, bad: comm.all_gather_v(
        np.ones(1), out=np.ones(3) if bad else np.ones(2)
    ),
    "root": lambda comm, bad: comm.gather_v(np.ones(1), root=2 if bad else 0),
    "scatter root": lambda comm, bad: comm.scatter_v(np.ones(2), [1, 1], root=-1 if bad else 0),
    "no array": lambda comm, bad: comm.all_gather_v("abc" if bad else np.ones(1)),
    "timeout": lambda comm, bad: comm.all_gather_v(np.ones(1), timeout=-1 if bad else 5),
    "out off the root": lambda comm, bad: comm.gather_v(np.ones(1), out=np.ones(2), root=0),
}


@pytest.mark.parametrize("what", ONE_RANK_IS_WRONG)
def test_peers_hear_of_a_refusal(run, what):
    def rank(comm):
        bad = comm.rank == 1
        with pytest.raises(ArgumentError if bad else PeerRejected):
            ONE_RANK_IS_WRONG[what](comm, bad)
        return float(comm.all_reduce(np.ones(1))[0])

    assert run(2, rank) == [2.0, 2.0]


def test_rows_of_different_sizes(run):
    def rank(comm):
        with pytest.raises(MismatchError, match="field 'row' differs") as caught:
            comm.all_gather_v(np.ones((4, 3 - (comm.rank == 1))))
        return str(caught.value), float(comm.all_reduce(np.ones(1))[0])

    for text, total in run(3, rank):
        assert "rank 1 differs from the others" in text
        for r, width in enumerate([3, 2, 3]):
            where = r"at test_v_variants.py:\d+ rank\(\)"
            assert re.search(rf"rank {r}: all_gather_v\(rows of {width} elements\) {where}", text)
        assert total == 3.0


def test_counts_that_differ(run):
    def rank(comm):
        counts = [3, 2, 1] if comm.rank == 2 else [1, 2, 3]
        with pytest.raises(MismatchError, match="field 'counts' differs: rank 2 differs") as caught:
            comm.reduce_scatter_v(np.ones(6), counts)
        return str(caught.value), float(comm.all_reduce(np.ones(1))[0])

    for text, total in run(3, rank):
        assert re.search(r"rank 0: reduce_scatter_v\(counts=\[1, 2, 3\]\) at test_v_variants", text)
        assert re.search(r"rank 2: reduce_scatter_v\(counts=\[3, 2, 1\]\) at test_v_variants", text)
        assert total == 3.0


MISMATCHES = {
    "dtype": lambda comm, odd: comm.all_gather_v(np.ones(3, np.float32 if odd else np.int32)),
    "count": lambda comm, odd: comm.scatter_v(np.ones(5), [2, 3] if odd else [3, 2]),
    "op": lambda comm, odd: comm.reduce_scatter_v(np.ones(2), [1, 1], "min" if odd else "max"),
    "root": lambda comm, odd: comm.gather_v(np.ones(2), int(odd)),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatches(run, what):
    def rank(comm):
        with pytest.raises(MismatchError, match=what):
            MISMATCHES[what](comm, comm.rank == 1)
        return True

    assert run(2, rank) == [True, True]


def test_the_same_arguments_twice_after_a_mismatch_of_counts(run):
    """Counts are compared before the call, so it costs nothing but the call."""

    def rank(comm):
        with pytest.raises(MismatchError, match="field 'counts' differs"):
            comm.reduce_scatter_v(np.ones(5), [2 + comm.rank, 3 - comm.rank])
        return comm.reduce_scatter_v(np.ones(5), [2, 3]).tolist()

    assert run(2, rank) == [[2.0] * 2, [2.0] * 3]


def turn(comm, seed, dtype, order):
    """Make every v-variant on blocks that a seed gives; return what is wrong with the results."""
    n, me, rng = comm.world_size, comm.rank, np.random.default_rng(seed)
    sent = rng.integers(0, 5, (n, n))
    counts = sent[0].tolist()
    rows = [block(r, sum(counts), (2,), dtype) for r in range(n)]
    parts = [rows[r][: counts[r]] for r in range(n)]
    full = [block(r, int(sent[r].sum()), (2,), dtype) for r in range(n)]
    mine, root = bounds(counts)[me], seed % n
    got = {
        "all_gather_v": (comm.all_gather_v(parts[me]), np.concatenate(parts)),
        "scatter_v": (comm.scatter_v(rows[me], counts, root), rows[root][mine]),
        "reduce_scatter_v": (
            comm.reduce_scatter_v(rows[me], counts, order=order),
            sum(rows)[mine],
        ),
        "all_to_all_v": (
            comm.all_to_all_v(full[me], sent[me].tolist()),
            np.concatenate([full[r][bounds(sent[r])[me]] for r in range(n)]),
        ),
    }
    joined = comm.gather_v(parts[me], root)
    if me == root:
        got["gather_v"] = joined, np.concatenate(parts)
    return [f"{name}: {w}" for name, pair in got.items() if (w := oracle.differences(*pair))]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sizes_that_change_and_come_back(run, n):
    """What was bound to some sizes serves them alone, whatever was called in between."""
    seeds = [*range(80), *range(79, 12, -1), *[3, 17] * 5]

    def rank(comm):
        wrong = []
        for i, seed in enumerate(seeds):
            dtype, order = ("int32", "int64", "float32")[i % 3], (None, "rank")[i // 3 % 2]
            wrong += turn(comm, seed, dtype, order)
        most = max(len(kept) for kept in comm._session.kept.values() if isinstance(kept, dict))
        return wrong, most

    results = run(n, rank)
    assert [wrong for wrong, _ in results] == [[]] * n
    assert max(most for _, most in results) <= 64


def test_the_first_call_in_a_block_of_symmetric_memory(run):
    """The sizes of later calls, outside, are exchanged all the same."""

    def rank(comm):
        with comm.symmetric():
            wrong = turn(comm, 0, "int32", None)
        return wrong + turn(comm, 1, "int32", None) + turn(comm, 0, "int32", None)

    assert run(2, rank) == [[], []]

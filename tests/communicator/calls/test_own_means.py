"""Means, and sums of 16-bit numbers, by algorithms that a program brings along."""

import ml_dtypes
import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold
from pycoll.testing import run_processes


def halves(share):
    """Return a reduce_scatter of two ranks with several chunks for each, by way of TMP."""

    @algorithm("reduce_scatter", f"by {share}", chunks=lambda n: share * n, slots=share)
    def made(rank, n):
        mine = share * rank
        yield fold(at(rank + 1, IN, mine), to=at(rank, TMP, 0), count=share)
        yield fold([at(rank, TMP, 0), at(rank, IN, mine)], to=at(rank, OUT, mine), count=share)

    return made


@algorithm("all_reduce", "guarded chain", order="rank", chunks=1, slots=1)
def chain(rank, n):
    for step in range(1, n):
        mine = rank == step
        if np.any(mine):  # nothing that rank 0 does
            source = at(0, IN) if step == 1 else at(step - 1, TMP)
            yield fold([source, at(rank, IN)], to=at(rank, TMP), where=mine)
    yield fold(at(n - 1, TMP), to=at(rank, OUT))


@algorithm("all_reduce", "parked", order="tree", chunks=1, slots=lambda n: n, in_place=False)
def parked(rank, n):
    yield [fold(at(peer, IN), to=at(rank, TMP, peer)) for peer in range(n)]
    yield fold([at(rank, TMP, peer) for peer in range(n)], to=at(rank, OUT), tree=True)


@pytest.mark.parametrize("share", [2, 3])
def test_a_mean_is_divided_once_whatever_the_chunks(share):
    """Blocks that are no multiples of their chunks have tables of where chunks lie."""

    def rank(comm):
        found = []
        for block in range(1, 2 * share + 2):
            x = np.arange(2.0 * block) + comm.rank
            symmetric = comm.empty(2 * block, np.float64)
            symmetric[:] = x
            for given in (x, symmetric):
                got = comm.reduce_scatter(given, op="avg", algorithm=halves(share))
                want = (np.arange(2.0 * block) + 0.5)[comm.rank * block :][:block]
                found.append(np.array_equal(got, want))
        return all(found)

    assert run_processes(2, rank) == [True, True]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_rounds_on_the_way_is_refused(dtype):
    """Even where rank 0 has no part in it."""

    def rank(comm):
        x = np.ones(8, dtype)
        with pytest.raises(ArgumentError, match="at every hop, not once"):
            comm.all_reduce(x, order="rank", algorithm=chain)
        return comm.all_reduce(x.astype(np.float32), order="rank", algorithm=chain).tolist()

    assert run_processes(3, rank) == [[3.0] * 8] * 3


@pytest.mark.parametrize("n", [2, 3])
def test_means_that_would_be_rounded_twice_are_refused(n):
    def rank(comm):
        x = np.full(8, 40000, np.float16)
        with pytest.raises(ArgumentError, match="before it divides by the number of ranks"):
            comm.all_reduce(x, "avg", order="tree", algorithm=parked)
        assert (comm.all_reduce(x, "avg", order="tree") == 40000).all()
        return comm.all_reduce(x.astype(np.float32), "avg", order="tree", algorithm=parked).tolist()

    assert run_processes(n, rank) == [[40000.0] * 8] * n

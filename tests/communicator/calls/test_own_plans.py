"""Own algorithms that are not the same on all ranks, or not the same each time they are asked."""

import itertools

import numpy as np
import pytest

from pycoll.errors import MismatchError
from pycoll.runtime.calls import plans
from pycoll.runtime.calls.descriptors import CUSTOM, algorithm_number
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.testing import run_processes


def in_order(ranks):
    @algorithm("all_reduce", "in order", chunks=1, in_place=False)
    def made(rank, n):
        yield fold([at(peer, IN) for peer in ranks], to=at(rank, OUT))

    return made


def confused(*args):
    """Return the number of an algorithm with 16 bits that all have."""
    return algorithm_number(*args) >> 16 << 16 | CUSTOM


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 5000])
def test_plans_with_the_same_short_number(monkeypatch, count, shared):
    monkeypatch.setattr(plans, "algorithm_number", confused)

    def rank(comm):
        mine = in_order([0, 1, 2] if comm.rank else [2, 1, 0])
        x = comm.empty(count) if shared else np.empty(count)
        x[:] = [1e16, 1.0, -1e16][comm.rank]
        with pytest.raises(MismatchError, match="'plans of the algorithm' differs"):
            comm.all_reduce(x, algorithm=mine)
        return True

    assert run_processes(3, rank) == [True] * 3


def test_algorithms_with_the_same_short_number(run, monkeypatch):
    monkeypatch.setattr(plans, "algorithm_number", confused)

    def rank(comm):
        name = "circulant" if comm.rank else "ring"
        with pytest.raises(MismatchError, match="'plans of the algorithm' differs"):
            comm.all_reduce(np.ones(100), algorithm=name, order="any")
        return True

    assert run(3, rank) == [True] * 3


def test_a_number_of_chunks_that_changes():
    def rank(comm):
        for changes in range(1, 20):
            asked = itertools.count()

            @algorithm(
                "all_reduce",
                f"other chunks after {changes}",
                chunks=lambda n, asked=asked, changes=changes: 1 + (next(asked) >= changes),
                in_place=False,
            )
            def made(rank, n):
                yield fold([at(peer, IN) for peer in range(n)], to=at(rank, OUT))

            assert (comm.all_reduce(np.ones(100), algorithm=made) == comm.world_size).all()
        return True

    assert run_processes(2, rank) == [True] * 2

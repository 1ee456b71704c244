"""Own algorithms that are not the same on all ranks."""

import numpy as np
import pytest

from pycoll.errors import MismatchError
from pycoll.runtime import plans
from pycoll.runtime.descriptors import CUSTOM, algorithm_number
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.testing import run_processes


def in_order(ranks):
    @algorithm("all_reduce", "in order", chunks=1, in_place=False)
    def made(rank, n):
        yield fold([at(peer, IN) for peer in ranks], to=at(rank, OUT))

    return made


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 5000])
def test_plans_with_the_same_short_number(monkeypatch, count, shared):
    def confused(*args):
        return algorithm_number(*args) >> 16 << 16 | CUSTOM

    monkeypatch.setattr(plans, "algorithm_number", confused)

    def rank(comm):
        mine = in_order([0, 1, 2] if comm.rank else [2, 1, 0])
        x = comm.empty(count) if shared else np.empty(count)
        x[:] = [1e16, 1.0, -1e16][comm.rank]
        with pytest.raises(MismatchError, match="'plans of the algorithm' differs"):
            comm.all_reduce(x, algorithm=mine)
        return True

    assert run_processes(3, rank) == [True] * 3

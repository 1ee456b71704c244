"""Over messages, too, nobody returns from a call before all ranks have entered it."""

import time

import numpy as np
import pytest

import chaos
from cases import shared_float
from pycoll.config import Config
from pycoll.errors import MismatchError
from pycoll.testing import run_processes

N = 3
CALLS = {
    "broadcast": lambda comm, x: comm.broadcast(x),
    "scatter": lambda comm, x: comm.scatter(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "gather": lambda comm, x: comm.gather(x),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
}


def over_tcp(body):
    """Run a function on ranks that are each on a host of its own; return what it returns."""

    def part(comm):
        with chaos.over_tcp(comm, list(range(N)), Config(10.0)) as connected:
            return body(connected)

    return run_processes(N, part, timeout=40)


@pytest.mark.parametrize("name", CALLS)
def test_all_have_entered_when_one_returns(name):
    entered = shared_float()

    def body(comm):
        comm.barrier()
        if comm.rank == N - 1:
            time.sleep(0.05)
            entered[0] = 1
        CALLS[name](comm, np.ones(N))
        return entered[0]

    assert over_tcp(body) == [1] * N


@pytest.mark.parametrize("name", CALLS)
def test_another_count_is_an_error_on_every_rank_in_that_call(name):
    def body(comm):
        with pytest.raises(MismatchError, match="'count' differs"):
            CALLS[name](comm, np.ones(N * (2 if comm.rank == N - 1 else 1)))
        return True

    assert over_tcp(body) == [True] * N

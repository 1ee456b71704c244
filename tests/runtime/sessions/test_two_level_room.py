"""Calls in two levels: for which a host has no room, that a rank cannot bind, or that come late."""

import time

import numpy as np
import pytest

import chaos
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollError, PeerRejected
from pycoll.testing import run_processes


def on_hosts(hosts, body, **settings):
    """Run a function on ranks that are on these hosts; return what it returns."""

    def part(comm):
        with chaos.over_tcp(comm, hosts, Config(20.0, **settings)) as connected:
            return body(connected)

    return run_processes(len(hosts), part, timeout=90)


@pytest.mark.parametrize("few", [1, 2])
def test_a_host_of_many_ranks_with_little_memory_has_no_error_of_its_own(few):
    """Its stages have more slots than fit there; the other host could run its own."""
    n = few + 12

    def body(comm):
        total, rank = n * (n - 1) // 2, comm.rank
        for count in (1, 3, 50, 1000):
            whole = np.arange(n * count) + 1000 * rank
            wanted = n * np.arange(n * count) + 1000 * total
            mine = slice(rank * count, (rank + 1) * count)
            assert (comm.all_reduce(whole) == wanted).all()
            assert (comm.reduce_scatter(whole) == wanted[mine]).all()
            columns = [np.arange(n * count)[mine] + 1000 * r for r in range(n)]
            assert (comm.all_to_all(whole) == np.concatenate(columns)).all()
            rows = np.concatenate([np.arange(count) + 1000 * r for r in range(n)])
            assert (comm.all_gather(whole[:count]) == rows).all()
            assert comm.all_reduce(np.full(count, 0.5))[0] == n / 2
        return comm.all_reduce(np.ones(1), async_op=True).wait()[0]

    assert on_hosts([0] * few + [1] * 12, body, cell_bytes=4096) == [float(n)] * n


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("error", [MemoryError("none left"), _C.EngineError("ArgumentError", "no")])
def test_what_one_rank_cannot_bind_all_hear_of(async_op, error):
    def body(comm):
        def refuse(spec):
            raise error

        def call():
            done = comm.all_reduce(np.arange(5.0), async_op=async_op)
            return done.wait() if async_op else done

        start, binder = time.monotonic(), comm._session._binder
        if comm.rank == 1:
            binder.staged = refuse
            wanted = MemoryError if isinstance(error, MemoryError) else CollError
            with pytest.raises(wanted, match="none left" if wanted is MemoryError else "no"):
                call()
            del binder.staged
        else:
            with pytest.raises(PeerRejected, match="rank 1 refused"):
                call()
        assert time.monotonic() - start < 15
        return call()[1]

    assert on_hosts([0, 0, 1, 1], body) == [4.0] * 4


def test_a_call_after_the_failure_of_a_message_raises():
    """Of which the memory of its host has not heard yet: it has no scratch memory to run on."""

    def body(comm):
        if comm.rank == 1:
            raise ValueError("this rank leaves")
        engine = comm._session.engine
        while not engine.failed:
            try:
                engine.poll()
            except _C.EngineError:
                break
        with pytest.raises(CollError):
            comm.reduce_scatter(np.ones(5 * 40_000), order="any")
        return "raised"

    def part(comm):
        connected = chaos.over_tcp(comm, [0, 0, 0, 0, 1], Config(20.0))
        try:
            with connected:
                return body(connected)
        except ValueError:
            return "raised"

    assert run_processes(5, part, timeout=60) == ["raised"] * 5

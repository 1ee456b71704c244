"""What happens while ranks call `shrink`: some are stuck, give up, fail or die."""

import functools
import os
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest

from faults import BOUND_S, KILLED, Event, die, who
from pycoll.errors import (
    CollError,
    CollTimeout,
    CommClosed,
    ConcurrentUseError,
    PeerLeft,
    PeerLost,
    Revoked,
)
from pycoll.runtime.sessions import shrink
from pycoll.testing import run_processes


def test_a_rank_that_is_stuck_is_waited_for():
    """It is never left out while it lives; once it has been ended the others can try again."""

    def rank(comm):
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(CollTimeout) as caught:
            comm.shrink(timeout=0.3 + 0.2 * comm.rank)
        waited = time.monotonic() - start
        assert f"rank 1 (process {pids[1]}) ha" in str(caught.value)
        assert "neither called it nor ended in time; end what is stuck" in str(caught.value)
        assert 0.3 <= waited < 5
        if comm.rank == 0:
            time.sleep(1)
            os.kill(int(pids[1]), signal.SIGKILL)
        return who(comm.shrink(), comm.rank)

    assert run_processes(3, rank, may_die=[1]) == [[0, 2], KILLED, [0, 2]]


def test_who_comes_too_late_and_who_gives_up(run):
    """Those who gave up can come again; the last to come finds them."""
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 0:
            event.wait()
        elif comm.rank == 1:
            with pytest.raises(CollTimeout, match="rank 0"):
                comm.shrink(timeout=0.1)
            event.happens()
        return who(comm.shrink(timeout=10), comm.rank)

    assert run(3, rank) == [[0, 1, 2]] * 3


def test_who_asks_again_and_again():
    """A limit may pass in any phase; whoever lives is in it in the end."""

    def rank(comm):
        comm.barrier()
        old = comm.rank
        if old != 0:
            time.sleep(0.1)
            return who(comm.shrink(), old)
        while True:
            try:
                return who(comm.shrink(timeout=0.004), old)
            except CollTimeout as error:
                assert "call shrink again" in str(error)  # noqa: PT017

    for _ in range(5):
        assert run_processes(4, rank) == [[0, 1, 2, 3]] * 4


def test_a_rank_that_is_stopped_before_it_joins(monkeypatch):
    def rank(comm):
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 2:
            stop = functools.partial(os.kill, os.getpid(), signal.SIGSTOP)
            monkeypatch.setattr(shrink, "member", lambda *_: stop())
        with pytest.raises(CollTimeout) as caught:
            comm.shrink(timeout=1.5)
        text = f"rank 2 (process {pids[2]}) has neither joined those who are left nor ended"
        assert text in str(caught.value)
        if comm.rank == 0:
            time.sleep(0.2)
            os.kill(int(pids[2]), signal.SIGKILL)
        return who(comm.shrink(), comm.rank)

    assert run_processes(4, rank, may_die=[2]) == [[0, 1, 3], [0, 1, 3], KILLED, [0, 1, 3]]


def test_a_slow_rank_finds_the_memory_of_its_round(monkeypatch):
    """The descriptor that it was told of belongs to the next round when it comes to open it."""

    def rank(comm):
        adopt = shrink.adopt

        def late(*args):
            monkeypatch.setattr(shrink, "adopt", adopt)
            time.sleep(0.3)
            return adopt(*args)

        comm.barrier()
        if comm.rank == 1:
            monkeypatch.setattr(shrink, "adopt", late)
        if comm.rank == 2:
            monkeypatch.setattr(shrink, "member", lambda *_: die())
        return who(comm.shrink(), comm.rank)

    assert run_processes(3, rank, may_die=[2]) == [[0, 1], [0, 1], KILLED]


def test_an_interrupt_when_all_have_joined(monkeypatch):
    """The others have the new communicator, and hear in it that this rank has left."""

    def interrupted(_):
        monkeypatch.undo()
        raise KeyboardInterrupt("now")

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            monkeypatch.setattr(shrink.Shrinking, "close", interrupted)
            with pytest.raises(KeyboardInterrupt, match="now"):
                comm.shrink()
            with pytest.raises(CommClosed):
                comm.shrink()
            return None
        left = comm.shrink()
        assert left.world_size == 3
        with pytest.raises(PeerLeft, match="KeyboardInterrupt: now"):
            left.barrier()
        return who(left.shrink(), comm.rank)

    assert run_processes(3, rank) == [[0, 2], None, [0, 2]]


def test_another_thread_in_a_call(run):
    """That is refused before anything has happened."""
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 0:
            thread = threading.Thread(target=comm.barrier)
            thread.start()
            time.sleep(0.2)
            with pytest.raises(ConcurrentUseError, match="one communicator per thread"):
                comm.shrink()
            event.happens()
            thread.join()
        else:
            event.wait()
            comm.barrier()
        return who(comm, comm.rank)

    assert run(2, rank) == [[0, 1]] * 2


def test_a_rank_that_cannot_join_leaves():
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
            with pytest.raises(CollError, match="Too many open files"):
                comm.shrink()
            with pytest.raises(CommClosed):
                comm.shrink()
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return None
        return who(comm.shrink(), comm.rank)

    assert run_processes(4, rank) == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]


@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_any_moment(seed):
    """Ranks die while the others shrink: all who are left end up together, with right sums."""
    chance = random.Random(seed)
    n = chance.choice([3, 4, 5])
    victims = chance.sample(range(n), chance.randint(1, n - 1))
    delays = [chance.uniform(0, 0.02) for _ in range(n)]

    def rank(comm):
        comm.barrier()
        if comm.rank in victims:  # by default the signal ends the process
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, delays[comm.rank] + 1e-6)
        old, end = comm.rank, time.monotonic() + 0.2
        x = comm.empty(50_000, np.float64)
        while True:
            try:
                while comm.all_reduce(np.array([time.monotonic() < end]), "or"):
                    x[:] = old
                    comm.all_reduce(x, out=x)
                    if (x != x[0]).any():
                        return "wrong"
                    comm = comm.shrink() if chance.random() < 0.1 else comm
                return who(comm, old)
            except CollError:
                comm = comm.shrink()

    results = run_processes(n, rank, may_die=victims)
    left = [r for r in range(n) if r not in victims]
    assert results == [-signal.SIGALRM if r in victims else left for r in range(n)]


@pytest.mark.parametrize("nested", [False, True])
def test_who_waits_in_a_part_hears_that_another_one_shrinks_the_whole(nested):
    """The rank that died has no part in it: only those who are called for can say so."""
    event = Event()

    def rank(comm):
        part = comm.split(comm.rank // 2)
        inner = part.dup() if nested else part
        comm.barrier()
        if comm.rank == 3:
            event.happens()
            die()
        if comm.rank == 0:
            with pytest.raises(Revoked, match="split from called shrink there"):
                inner.all_reduce(np.ones(3))
            assert event.age() < BOUND_S
        else:
            with pytest.raises(PeerLost):
                comm.barrier()
        return who(comm.shrink(timeout=10), comm.rank)

    assert run_processes(4, rank, may_die=[3]) == [[0, 1, 2]] * 3 + [KILLED]

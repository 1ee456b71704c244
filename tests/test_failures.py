"""Ranks that die, leave, stop or are interrupted: what the others hear of it, and how soon."""

import mmap
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from pycoll.errors import CollTimeout, PeerLeft, PeerLost, Revoked
from pycoll.testing import RankFailed, run_processes, run_threads

BOUND_S = 1.0
X = np.ones(100)

# Ways of waiting for the others.
WAITS = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "large all_reduce": lambda comm: comm.all_reduce(np.ones(300_000)),
    "ring": lambda comm: comm.all_reduce(X, algorithm="ring", order="any"),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(X, root=1),
    "gather": lambda comm: comm.gather(X),
    "in the background": lambda comm: comm.all_reduce(X, async_op=True).wait(),
    "v-variant": lambda comm: comm.all_gather_v(X),
    "recv": lambda comm: comm.recv(np.empty(3), 1),
    "split": lambda comm: comm.split(0),
}


class Event:
    """When something happened on rank 1, in memory that all ranks see."""

    def __init__(self):
        self._time = np.frombuffer(mmap.mmap(-1, 4096), np.float64)

    def happens(self):
        self._time[0] = time.monotonic()

    def age(self):
        return time.monotonic() - self._time[0]


def expect(comm, error, wait, event, match=None):
    """Wait until the error comes; return its text. A later call must raise it too."""
    with pytest.raises(error, match=match) as caught:
        wait(comm)
    assert event.age() < BOUND_S
    with pytest.raises(error):
        comm.barrier()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank(wait):
    event = Event()

    def rank(comm):
        comm.all_reduce(X)
        if comm.rank == 1:
            time.sleep(0.1)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(comm, PeerLost, WAITS[wait], event)

    first, code, third = run_processes(3, rank, may_die=[1])
    assert code == -signal.SIGKILL
    assert first[0] == third[0] == "PeerLost"
    assert "rank 1 (process" in first[1]
    assert "died; its last call was all_reduce(float64[100]" in first[1]
    assert "test_failures.py:" in first[1]


@pytest.mark.parametrize("early", [True, False], ids=["before the call", "while the others wait"])
def test_a_killed_rank_with_much_memory(early):
    event = Event()

    def rank(comm):
        if comm.rank == 1:
            ballast = np.ones(256 << 17)
            comm.barrier()
            time.sleep(0 if early else 0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
            return ballast
        comm.barrier()
        time.sleep(0.2 if early else 0)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    assert run_processes(3, rank, may_die=[1]) == ["PeerLost", -signal.SIGKILL, "PeerLost"]


@pytest.mark.parametrize("victims", [[0], [0, 1, 2]], ids=["the first", "all but one"])
def test_several_victims(victims):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank in victims:
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    results = run_processes(4, rank, may_die=victims)
    assert results == [-signal.SIGKILL if r in victims else "PeerLost" for r in range(4)]


def test_a_crash_and_a_silent_end():
    def rank(comm):
        event = Event()
        event.happens()
        if comm.rank == 1:
            os._exit(3)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    assert run_processes(2, rank, may_die=[1]) == ["PeerLost", 3]


@pytest.mark.parametrize("kill_after_ms", [0, 1, 3, 10, 30])
def test_a_rank_that_is_killed_in_the_middle(kill_after_ms):
    """Wherever it was: the survivors raise, and until then every result is right."""

    def rank(comm):
        if comm.rank == 1:
            pid = os.getpid()
            killer = threading.Timer(kill_after_ms / 1000, os.kill, (pid, signal.SIGKILL))
            killer.start()
        x = np.arange(50_000.0)

        def work():
            while True:
                result = comm.all_reduce(x, algorithm="ring", order="any")
                assert (result[::999] == 3 * x[::999]).all()

        with pytest.raises(PeerLost):
            work()
        return True

    assert run_processes(3, rank, may_die=[1]) == [True, -signal.SIGKILL, True]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("error", [KeyError("lost key"), SystemExit(3)], ids=repr)
def test_a_rank_that_raises(run, wait, error):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.05)
            event.happens()
            raise type(error)(*error.args)
        text = expect(comm, PeerLeft, WAITS[wait], event)[1]
        assert f"left: {type(error).__name__}: {error}" in text
        return None

    with pytest.raises(RankFailed, match=r"^rank 1 failed:(.|\n)*") as caught:
        run(3, rank)
    assert str(caught.value).count("failed:") == 1
    assert "then rank" not in str(caught.value)


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_closes(run, wait):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            event.happens()
            comm.close()
            return None
        return expect(comm, PeerLeft, WAITS[wait], event)[1]

    results = run(2, rank)
    assert re.search(r"rank 1\b.*closed", results[0])


def test_closing_after_the_last_call_disturbs_nobody(run):
    def rank(comm):
        total = 0.0
        for root in range(comm.world_size):
            total += float(comm.broadcast(X, root=root)[0])
        comm.reduce(X)
        comm.close()
        return total

    for _ in range(20):
        assert run(3, rank) == [3.0] * 3


def test_a_stopped_rank():
    def rank(comm):
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(CollTimeout) as caught:
                comm.all_reduce(X)
            return str(caught.value)
        start = time.monotonic()
        with pytest.raises(CollTimeout) as caught:
            comm.all_reduce(X, timeout=0.5)
        elapsed = time.monotonic() - start
        assert 0.5 <= elapsed < 0.5 + BOUND_S
        time.sleep(0.2)
        os.kill(int(pids[1]), signal.SIGCONT)
        return str(caught.value)

    texts = run_processes(3, rank)
    for text in texts:
        assert re.search(r"rank [02] gave up after waiting 0\.5\d* s", text)
        assert "waits for rank 1 to make this call" in text
        assert "rank 1: has not made this call; last call: all_gather(int64[" in text
        assert "is stopped by a signal" in text
    assert len(set(texts)) == 1


def test_a_pause_is_no_death():
    def rank(comm):
        pid = int(comm.broadcast(np.array([os.getpid()]), root=1)[0])
        if comm.rank == 0:
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        if comm.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        return float(comm.all_reduce(np.ones(1))[0])

    assert run_processes(3, rank) == [3.0] * 3


def test_a_chain_of_waiting_ranks_names_its_end():
    """Rank 2 waits for 1 and 1 for 0, which is busy with something else."""

    def rank(comm):
        comm.barrier()
        if comm.rank == 0:
            time.sleep(1)
        elif comm.rank == 1:
            with pytest.raises(CollTimeout) as caught:
                comm.recv(np.empty(1), 0, timeout=5)
            return str(caught.value)
        else:
            with pytest.raises(CollTimeout) as caught:
                comm.all_reduce(X, timeout=0.3)
            return str(caught.value)
        return ""

    text = run_processes(3, rank)[2]
    assert "rank 2: is in all_reduce(" in text
    assert "rank 0: has not made this call; last call: barrier(" in text


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c(wait):
    event = Event()

    def rank(comm):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(int(pids[0]), signal.SIGINT)
            time.sleep(0.2)
        if comm.rank:
            return expect(comm, Revoked, WAITS[wait], event, "interrupt")[0]
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](comm)
        assert event.age() < BOUND_S
        with pytest.raises(Revoked):
            comm.barrier()
        return "KeyboardInterrupt"

    results = run_processes(3, rank)
    assert results == ["KeyboardInterrupt", "Revoked", "Revoked"]


def test_a_signal_whose_handler_returns_disturbs_nobody():
    def rank(comm):
        seen = []
        signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
        if comm.rank == 0:
            for delay in (0.05, 0.1, 0.15):
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        else:
            time.sleep(0.4)
        return float(comm.all_reduce(np.ones(1))[0]), len(seen)

    assert run_processes(2, rank) == [(2.0, 3), (2.0, 0)]


def test_abort_from_another_thread():
    event = Event()

    def rank(comm):
        if comm.rank == 0:

            def stop():
                event.happens()
                comm.abort("the user pressed stop")

            threading.Timer(0.2, stop).start()
        if comm.rank == 1:
            time.sleep(0.4)
        return expect(comm, Revoked, WAITS["barrier"], event, "the user pressed stop")[0]

    assert run_threads(3, rank) == ["Revoked"] * 3
    assert run_processes(3, rank) == ["Revoked"] * 3

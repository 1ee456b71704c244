"""Small calls over messages keep Python's lock while they spin; nobody hangs for it."""

import signal
import threading

import numpy as np
import pytest

import chaos
from pycoll.config import Config
from pycoll.errors import CollError
from pycoll.testing import run_processes

CALLS = 600


def over_tcp(n, body):
    """Run a function on ranks that are each on a host of its own; return what it returns."""

    def part(comm):
        with chaos.over_tcp(comm, list(range(n)), Config(20.0)) as connected:
            return body(connected)

    return run_processes(n, part, timeout=90)


@pytest.fixture
def ticks():
    """Have Python handle a signal again and again; return how often it has."""
    seen = []

    def start():
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        signal.setitimer(signal.ITIMER_REAL, 2e-3, 2e-3)
        return seen

    return start


@pytest.mark.parametrize("n", [2, 3])
def test_calls_messages_queue_and_signals_at_once(n, ticks):
    """Threads that need the lock and that of the communicator, in every order."""

    def body(comm):
        wrong = []
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n

        def talk():
            for i in range(CALLS // 3):
                work = comm.isend(np.array([i]), right, 7)
                found = comm.recv(np.empty(1, np.int64), left, 7)
                work.wait()
                if found[0] != i:
                    wrong.append(f"message {i} is {found[0]}")

        def compute():  # wants Python's lock all the time
            while not over.is_set():
                sum(range(100))

        over = threading.Event()
        threads = [threading.Thread(target=work, daemon=True) for work in (talk, compute)]
        seen = ticks()
        for thread in threads:
            thread.start()
        x = np.ones(2)
        for i in range(CALLS):
            if i % 50 == 0:
                work = comm.all_reduce(x, async_op=True)
            if comm.all_reduce(x)[0] != n:
                wrong.append(f"call {i}")
            if i % 50 == 9 and work.wait()[0] != n:
                wrong.append(f"call {i} in the background")
        threads[0].join(60)
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return wrong, threads[0].is_alive(), len(seen) > 0

    assert over_tcp(n, body) == n * [([], False, True)]


@pytest.mark.parametrize("n", [2, 3])
def test_another_thread_runs_while_a_call_waits(n):
    """A rank that waits for a late one has let go of the lock."""

    def body(comm):
        comm.all_reduce(np.ones(1))
        if comm.rank == 0:
            threading.Event().wait(0.5)
        counted, over = [0], threading.Event()

        def count():
            while not over.wait(0.01):
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        comm.all_reduce(np.ones(1))
        over.set()
        thread.join()
        return counted[0]

    assert min(over_tcp(n, body)[1:]) > 5


def test_a_failure_is_an_error_whether_or_not_anybody_has_waited():
    """The rank that comes second finds the difference at once, while it still has the lock."""

    def body(comm):
        x = np.ones(2 + comm.rank)
        with pytest.raises(CollError, match="all_reduce"):
            comm.all_reduce(x)
        return True

    assert over_tcp(2, body) == [True, True]

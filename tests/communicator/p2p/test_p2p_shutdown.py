"""Tagged messages while ranks end, and between threads."""

import contextlib
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import pycoll
from pycoll.errors import PeerLeft
from pycoll.testing import RankFailed, run_processes


def test_the_sender_has_left():
    def rank(comm):
        if comm.rank == 0:
            raise KeyError("gone")
        with pytest.raises(PeerLeft, match="gone"):
            comm.recv(np.empty(3), 0)
        return True

    with pytest.raises(RankFailed, match=r"rank 0 failed:(.|\n)*KeyError: 'gone'$"):
        run_processes(2, rank)


@pytest.mark.parametrize("end", ["killed", "left", "closed"])
def test_the_last_message_of_a_sender_arrives(end):
    def rank(comm):
        x = np.empty(3)
        if comm.rank == 1:
            comm.recv(x, 0)
            return x.tolist()
        comm.send(np.arange(3.0), 1)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "left":
            raise KeyError("gone")
        return comm.close()

    for _ in range(12):
        if end == "closed":
            assert run_processes(2, rank) == [None, [0, 1, 2]]
        else:
            with pytest.raises(RankFailed, match=r"^rank 0"):
                run_processes(2, rank)


def test_two_threads_at_once(run):
    """One waits for a message that the peer sends once it has heard of the other."""

    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.3)
            x = np.empty(1)
            comm.recv(x, 0)
            comm.send(np.arange(3.0) + x, 0)
            return None
        x = np.empty(3)
        thread = threading.Thread(target=comm.recv, args=(x, 1))
        thread.start()
        time.sleep(0.1)
        comm.send(np.ones(1), 1)
        thread.join()
        return x.tolist()

    assert run(2, rank) == [[1, 2, 3], None]


def test_closing_while_a_thread_receives(run):
    def rank(comm):
        caught = []

        def receive():
            try:
                comm.recv(np.empty(3), 1 - comm.rank)
            except pycoll.CollError as error:
                caught.append(type(error).__name__)

        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.05)
        comm.close()
        thread.join(timeout=5)
        return caught

    for caught in run(2, rank):
        assert caught in (["CommClosed"], ["PeerLeft"])


def test_closing_while_threads_send_to_their_own_rank():
    """Whatever they are in, what they hear of is that the communicator is closed."""

    def rank(comm):
        x, y, small, caught = np.zeros(100_000), np.empty(100_000), np.zeros(3), set()
        calls = (
            lambda twin: twin.isend(x, 0, 1),
            lambda twin: twin.irecv(y, 0, 2),
            lambda twin: twin.isend(small, 0, 3),
            lambda twin: (twin.irecv(np.empty(100_000), 0, 4), twin.send(x, 0, 4)),
        )

        def repeat(call, twin):
            try:
                for _ in range(200):
                    call(twin)
            except Exception as error:
                caught.add(type(error))

        for turn in range(25):
            twin = comm.dup()
            threads = [threading.Thread(target=repeat, args=(call, twin)) for call in calls]
            for thread in threads:
                thread.start()
            time.sleep(0.0003 * (turn % 5))
            with contextlib.suppress(pycoll.ConcurrentUseError):  # a thread waits for a message
                twin.close()
            for thread in threads:
                thread.join()
            twin.close()
        return caught

    with short_turns():
        (caught,) = run_processes(1, rank)
    assert all(issubclass(kind, pycoll.CollError) for kind in caught), caught


@contextlib.contextmanager
def short_turns():
    """Let threads, also of ranks that are started meanwhile, have the lock in quick succession."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_receiving_from_anybody_when_all_have_closed(run):
    """What was sent still arrives; then there is nobody left to wait for."""

    def rank(comm):
        if comm.rank > 0:
            comm.send(np.full(40_000, comm.rank, np.float32), 0)
            return comm.close()
        x, senders = np.empty(40_000, np.float32), set()
        for _ in range(comm.world_size - 1):
            senders.add(comm.recv(x))
            assert set(x.tolist()) <= senders
        with pytest.raises(PeerLeft, match=r"from any rank.*all other ranks have closed"):
            comm.recv(x)
        comm.send(x, 0)  # and what a rank sends to itself
        senders.add(comm.recv(x))
        return senders

    assert run(3, rank)[0] == {0, 1, 2}

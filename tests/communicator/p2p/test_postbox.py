"""The postbox of a rank beside its other threads, in a forked child, and when it closes."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from communicator.memory.test_messages_memory import MIB, limit_memory
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CommClosed, ForkedError, PeerLeft
from pycoll.testing import run_processes


def posted(box, x, tag, src=0):
    return box.recv(x.ctypes.data, x.nbytes, 1, src, tag)


def test_two_threads_wait_for_one_message():
    """One of them would look at what the other one has forgotten."""

    def rank(comm):
        box, x = _C.Postbox(comm._session.engine), np.zeros(4, np.uint8)
        ticket, senders = posted(box, x, 0), []
        first = threading.Thread(target=lambda: senders.append(box.wait(ticket, 10)))
        first.start()
        time.sleep(0.1)
        with pytest.raises(_C.EngineError, match="ConcurrentUseError"):
            box.wait(ticket, 10)
        box.send(np.full(4, 7, np.uint8).ctypes.data, 4, 1, 0, 0)
        first.join()
        return senders, x.tolist()

    assert run_processes(1, rank, timeout=30) == [([0], [7] * 4)]


def test_a_forked_child_drops_a_postbox_whose_thread_waits():
    def rank(comm):
        box, x = _C.Postbox(comm._session.engine), np.zeros(4, np.uint8)
        ticket = posted(box, x, 0)
        time.sleep(0.05)  # its thread begins
        box.send(x.ctypes.data, 4, 1, 0, 0)
        box.wait(ticket, 10)
        time.sleep(0.05)  # its thread waits for work
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            box = None
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert run_processes(1, rank, timeout=30) == [0]


def test_a_forked_child_takes_no_messages_of_its_parent():
    """Who asks there whether a message has come gets nothing, and takes nothing away."""

    def rank(comm):
        x, found = np.zeros(4), []
        for _ in range(8):
            if comm.rank == 1:
                comm.recv(x, 0)
                comm.send(np.full(4, 7.0), 0)
                continue
            work = comm.irecv(x, 1)
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                until = time.monotonic() + 0.1
                while time.monotonic() < until:
                    work.done()
                os._exit(work.done())
            comm.send(x, 1)
            found += [work.wait(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
        return found

    assert run_processes(2, rank, timeout=30) == [[1, 0] * 8, []]


IN_CHILD = {
    "wait": lambda comm, coming, going: coming.wait(1),
    "wait for one that is sent": lambda comm, coming, going: going.wait(1),
    "forget": lambda comm, coming, going: coming.forget(),
    "give up": lambda comm, coming, going: going.give_up(),
    "probe": lambda comm, coming, going: comm.probe(1, timeout=1),
}


@pytest.mark.parametrize("use", IN_CHILD)
def test_a_forked_child_is_refused_the_messages_of_its_parent(use):
    """It would take what comes for the parent, or wait for a thread that is not there."""

    def rank(comm):
        x, y, codes = np.zeros(1 << 19), np.ones(1 << 19), []
        for _ in range(6):
            work = comm.irecv(x, 1 - comm.rank)
            going = comm.isend(y, 1 - comm.rank)
            if comm.rank == 0:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(10)
                    try:
                        IN_CHILD[use](comm, work, going)
                    except ForkedError:
                        os._exit(0)
                    os._exit(not going.done())  # unless it had been sent before
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            work.wait()
            going.wait()
        return codes, float(x.min())

    found = run_processes(2, rank, config=Config(timeout_s=20), timeout=60)
    assert found == [([0] * 6, 1.0), ([], 1.0)]


def test_a_communicator_closes_while_a_thread_waits_for_another_message():
    """The array is gone in which half of one lies: nobody looks at that half again."""

    def rank(comm):
        ends = []

        def waits(work):
            try:
                work.wait()
            except CommClosed:
                ends.append("closed")

        for _ in range(5):
            x, twin = np.zeros(32 << 20 if comm.rank == 0 else 1), comm.dup()
            if comm.rank == 0:
                twin.irecv(x, 1)
                never = twin.irecv(np.zeros(3), 1, tag=2)
                thread = threading.Thread(target=waits, args=[never])
                thread.start()
                while not x[0]:
                    time.sleep(0.001)
                twin.close()
                x = None
                thread.join()
            else:
                with pytest.raises(PeerLeft):
                    twin.isend(np.ones(32 << 20), 0).wait()
                twin.close()
        return ends

    assert run_processes(2, rank, config=Config(timeout_s=20), timeout=60) == [["closed"] * 5, []]


def test_a_postbox_closes_in_the_middle_of_a_message():
    """Nobody asks for it any more, so it needs no memory, of which there may be none."""

    def rank(comm):
        x = np.full(300 * MIB, 1 - comm.rank, np.uint8)
        box = _C.Postbox(comm._session.engine)
        comm.barrier()
        if comm.rank == 0:
            box.send(x.ctypes.data, x.nbytes, 1, 1, 0)
        else:
            limit_memory(100 * MIB)
            ticket = posted(box, x, 0)
            while not x[0]:
                box.done(ticket)
        if comm.rank == 1:
            box.close()
            assert not x[-1]  # it was the middle
        comm.barrier()
        if comm.rank == 0:
            box.close()
        return float(comm.all_reduce(np.ones(3))[0])

    assert run_processes(2, rank, config=Config(timeout_s=10), timeout=60) == [2.0, 2.0]

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

"""Messages that come to ranks without memory for them."""

import resource
import time

import numpy as np
import pytest

from faults import Event
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollTimeout, Revoked, TransportError
from pycoll.testing import run_processes

MIB = 1 << 20
TEXT = "rank {} has no memory for a message of {} bytes from rank {} that no call there waits for"


def limit_memory(nbytes):
    """Let this process map so many bytes more, as `ulimit -v` does."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.RLIM_INFINITY))


def send_and_recv(comm, x):
    """Send to the other of two ranks; then look for what it sends, if it has taken all of x."""
    comm.send(x, 1 - comm.rank)
    comm.recv(np.empty(3), 1 - comm.rank, tag=1)


@pytest.mark.parametrize("single_copy", ["auto", "off"])
def test_a_receiver_that_gives_up(single_copy):
    """What has landed in its array cannot be kept, and nothing lands there any more."""
    nbytes, begun = 200 * MIB, Event()

    def rank(comm):
        x = np.ones(nbytes, np.uint8)
        comm.barrier()
        if comm.rank == 0:
            begun.happens()
            with pytest.raises(Revoked, match=TEXT.format(1, nbytes, 0)):
                comm.send(x, 1)
            return True
        limit_memory(100 * MIB)
        begun.wait()
        time.sleep(0.05)
        x[:] = 0
        with pytest.raises(CollTimeout):
            comm.recv(x, 0, timeout=0.004)
        x[:] = 0
        with pytest.raises((Revoked, TransportError), match=TEXT.format(1, nbytes, 0)):
            comm.recv(np.empty(3), 0, tag=1)
        return not x.any()

    config = Config(timeout_s=10, single_copy=single_copy)
    assert run_processes(2, rank, config=config, timeout=60) == [True, True]


def test_a_sender_that_stores_what_comes_meanwhile():
    def rank(comm):
        x = np.ones((50, 256)[comm.rank] * MIB, np.uint8)
        comm.barrier()
        if comm.rank == 0:
            limit_memory(100 * MIB)
            with pytest.raises(TransportError, match=TEXT.format(0, 256 * MIB, 1)):
                send_and_recv(comm, x)
            with pytest.raises(Revoked):
                comm.send(np.ones(3), 1)
            return True
        with pytest.raises(Revoked, match=TEXT.format(0, 256 * MIB, 1)):
            send_and_recv(comm, x)
        return True

    assert run_processes(2, rank, timeout=60) == [True, True]


def test_a_postbox_without_room_for_its_thread():
    """What is posted moves while somebody waits; nothing is left behind by a post that failed."""

    def rank(comm):
        box = _C.Postbox(comm._session.engine)
        x = np.full(1000, comm.rank, np.uint8)
        limit_memory(4 * MIB)  # less than the stack of a thread
        comm.barrier()
        if comm.rank == 0:
            comm.barrier()
            ticket = box.send(x.ctypes.data, x.nbytes, 0, 1, 5)
        else:
            ticket = box.recv(x.ctypes.data, x.nbytes, 0, 0, 5)
            comm.barrier()
        if ticket:
            box.wait(ticket, 10)
        box.close()
        return x.any()

    assert run_processes(2, rank, timeout=60) == [False, False]

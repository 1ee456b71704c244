"""Ranks that leave a call while peers read or write their arrays, and use these again at once."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.errors import CollTimeout, PeerLost, Revoked
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold
from pycoll.testing import run_processes

COUNT = 96 << 20  # elements: it takes long enough to be interrupted
TAIL = slice(-1000, None)  # what comes last
CONFIG = Config(timeout_s=30, heap_bytes=1 << 30)


@algorithm("broadcast", "push", chunks=1, root=0)
def push(rank, n, root):
    """The root stores everything in all outputs, and the others only wait."""
    yield fold(at(root, IN), to=[at(r, OUT) for r in range(n)], where=rank == root)


def interrupt_soon():
    """Interrupt this process while it is in its next call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.005, lambda: signal.raise_signal(signal.SIGINT)).start()


@pytest.mark.parametrize("memory", ["private", "symmetric"])
def test_nobody_gets_what_was_read_too_late(memory):
    def rank(comm):
        symmetric = memory == "symmetric"
        x = (comm.empty if symmetric else np.empty)(COUNT, np.float32)
        x[:] = comm.rank
        options = {"algorithm": "direct"} if symmetric else {}  # the others fetch everything
        for _ in range(2):  # from the third call on, private arrays are read, too
            comm.broadcast(x, root=1, out=x, **options)
        comm.barrier()
        if comm.rank == 1:
            interrupt_soon()
        try:
            comm.broadcast(x, root=1, out=x, **options)
        except (KeyboardInterrupt, Revoked) as error:
            x[TAIL] = 99
            return type(error).__name__
        return bool((x == 1).all())

    first, second = run_processes(2, rank, timeout=60, config=CONFIG)
    assert first in ("Revoked", True)
    assert second == "KeyboardInterrupt"


def test_nobody_writes_into_arrays_of_a_rank_that_has_left():
    def rank(comm):
        x, out = comm.empty(COUNT, np.float32), comm.empty(COUNT, np.float32)
        x[:], out[:] = comm.rank, 0
        group = comm.dup()  # fails, while the heap goes on with comm
        group.broadcast(x, out=out, algorithm=push)
        group.barrier()
        if comm.rank == 1:
            interrupt_soon()
        caught = ""
        try:
            group.broadcast(x, out=out, algorithm=push)
        except (KeyboardInterrupt, Revoked) as error:
            caught = type(error).__name__
        out[TAIL] = 99
        time.sleep(0.1)
        comm.barrier()
        return caught, bool((out[TAIL] == 99).all())

    first, second = run_processes(2, rank, timeout=60, config=CONFIG)
    assert first in (("Revoked", True), ("", True))  # it may just have stored everything
    assert second == ("KeyboardInterrupt", True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_does_not_leave_is_not_waited_for_long(how):
    def rank(comm):
        x = comm.empty(1 << 20, np.float32)
        x[:] = 1
        comm.all_reduce(x, out=x)
        pid = int(comm.broadcast(np.array([os.getpid()]))[0])
        if comm.rank == 0:
            signal.raise_signal(how)
        start = time.monotonic()
        with pytest.raises((PeerLost, CollTimeout), match="rank 0") as caught:
            comm.all_reduce(x, out=x, timeout=0.5)
        assert time.monotonic() - start < 2
        start = time.monotonic()
        for _ in range(5):  # from now on every call fails at once
            with pytest.raises((PeerLost, CollTimeout)):
                comm.all_reduce(x, out=x)
        assert time.monotonic() - start < 0.4
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        return type(caught.value).__name__

    killed, result = run_processes(2, rank, timeout=20, config=CONFIG, may_die=[0])
    assert killed == -signal.SIGKILL
    assert result == ("PeerLost" if how == signal.SIGKILL else "CollTimeout")

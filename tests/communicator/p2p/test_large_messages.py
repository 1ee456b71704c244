"""Messages larger than their mailbox, which receivers copy out of the memory of the sender."""

import os
import signal
import time

import numpy as np
import pytest

from communicator.calls.test_single_copy import secret
from faults import Event
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollTimeout, PeerLost, Revoked
from pycoll.testing import run_processes

ROOM = 256 << 10  # bytes of a mailbox, some of which are not data
SIZES = (ROOM - 4096, ROOM, ROOM + 1, 5 << 20, 300 << 20)
LARGE = 4 << 20
WAYS = ("once", "chosen", "off")  # always offered, offered if wanted, never


def values(nbytes, seed):
    """Return bytes that tell where they belong; their period, a prime, fits no piece's size."""
    period = (np.arange(65521, dtype=np.uint32) * np.uint32(2654435761) >> 24).astype(np.uint8)
    return np.resize(period + np.uint8(seed), nbytes)


def run(n, rank, *args, way="once", **kwargs):
    """Run ranks whose large messages go one way."""

    def with_way(comm, *args):
        if way == "once":
            engine = comm._session.engine
            comm._session._open_postbox(_C.Postbox(engine, offers=_C.Offers.ALWAYS))
        return rank(comm, *args)

    config = Config(timeout_s=10, single_copy="off" if way == "off" else "auto")
    return run_processes(n, with_way, *args, config=config, **kwargs)


@pytest.mark.parametrize("way", WAYS)
def test_sizes(way):
    def rank(comm):
        for nbytes in SIZES:
            found = np.empty(nbytes, np.uint8)
            if comm.rank == 0:
                x = values(nbytes, 1)
                comm.send(x, 1)
                x[:] = 0  # it has left
                comm.recv(found, 1)
            else:
                comm.recv(found, 0)
                comm.send(found, 0)
            if not np.array_equal(found, values(nbytes, 1)):
                return nbytes
        return 0

    assert run(2, rank, way=way, timeout=60) == [0, 0]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_all_send_at_once(n, way):
    """To their neighbours, with tags that are received in another order."""

    def rank(comm):
        there, here = (comm.rank + 1) % n, (comm.rank - 1) % n
        wrong = []
        for turn in range(3):
            for tag in (1, 2):
                comm.send(values(LARGE // n + tag, comm.rank + tag), there, tag)
            for tag in (2, 1):
                found = np.empty(LARGE // n + tag, np.uint8)
                comm.recv(found, here, tag)
                good = np.array_equal(found, values(LARGE // n + tag, here + tag))
                wrong += [] if good else [(turn, tag)]
        return wrong

    assert run(n, rank, way=way, timeout=60) == [[]] * n


@pytest.mark.parametrize("where", ["secret", "symmetric", "registered", "uid"])
def test_memory_of_all_kinds(where):
    """Also what no other process can read: then it goes through the mailbox."""
    if where == "secret" and secret(4096) is None:
        pytest.skip("this kernel has no memfd_secret")
    if where == "uid" and os.getuid() != 0:
        pytest.skip("to become another user takes root")

    def rank(comm):
        x, out = np.empty(LARGE, np.float32), np.zeros(LARGE, np.float32)
        if where == "secret":
            x = secret(4 * LARGE)
        elif where == "symmetric":
            x, out = comm.empty(LARGE), comm.zeros(LARGE)
        elif where == "registered":
            comm.register(x)
            comm.register(out)
        elif comm.rank == 1:
            os.setuid(65534)
        for turn in range(3):
            x[:] = comm.rank + turn
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(out, 1)
            else:
                comm.recv(out, 0)
                comm.send(x, 0)
            if not (out == 1 - comm.rank + turn).all():
                return turn
        return -1

    assert run(2, rank) == [-1, -1]


@pytest.mark.parametrize(
    ("before", "size", "taken"),
    [(0, LARGE, True), (2, LARGE, False), (2, 2 * LARGE, True), (2, LARGE + 1, False)],
)
def test_what_is_wanted(before, size, taken):
    """The third message of a size is offered, so nothing of it leaves before it is received."""
    over = Event()

    def rank(comm):
        x = np.ones(LARGE, np.uint8)
        for _ in range(before):
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            comm.barrier()  # or the next message comes before it is expected, and does not count
        if comm.rank == 1:
            over.wait()
            return True
        with pytest.raises(CollTimeout) as caught:
            comm.send(np.ones(size, np.uint8), 1, timeout=0.3)
        over.happens()
        return (" 0 bytes taken within" in str(caught.value)) != taken

    assert run(2, rank, way="chosen") == [True, True]


def test_both_ways_in_turn():
    """Messages of two sizes, often enough for every way to be tried and taken."""

    def rank(comm):
        xs = [np.empty(ROOM + 1 << k, np.uint8) for k in (0, 2)]
        for turn in range(400):
            x = xs[turn % 2 if turn % 7 else 0]
            if comm.rank == 0:
                x[:] = turn % 251
                comm.send(x, 1)
                x[:] = 255
            else:
                comm.recv(x, 0)
                if not (x == turn % 251).all():
                    return turn
        return -1

    assert run(2, rank, way="chosen", timeout=60) == [-1, -1]


def test_a_sender_that_gives_up():
    """What it has offered is its own again: the receiver never takes what has changed since."""

    def rank(comm):
        x = np.ones(64 << 20, np.uint8)
        if comm.rank == 0:
            text = r" 0 bytes taken within 0\.3 s; rank 1 has not received it\. The communicator"
            with pytest.raises(CollTimeout, match=text):
                comm.send(x, 1, timeout=0.3)
            x[:] = 2
        else:
            time.sleep(0.6)
            with pytest.raises(Revoked):
                comm.recv(x, 0)
        return True

    assert run(2, rank) == [True, True]


def test_a_sender_that_gives_up_while_it_is_read():
    """Either all of it has come as it was, or nothing has."""

    def rank(comm, patience):
        x = np.ones(64 << 20, np.uint8)
        comm.barrier()
        try:
            if comm.rank == 0:
                comm.send(x, 1, timeout=patience)
            else:
                comm.recv(x, 0)
        except (CollTimeout, Revoked) as error:
            x[:] = 2
            return type(error).__name__
        if comm.rank == 0:
            x[:] = 2
            return "sent"
        return "sent" if (x == 1).all() else "torn"

    ends = [run(2, rank, patience) for patience in (*0.001 * 1.6 ** np.arange(11), 5)]
    assert {tuple(end) for end in ends} <= {("sent", "sent"), ("CollTimeout", "Revoked")}, ends
    assert ends[-1] == ["sent", "sent"]


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_sender_that_ends(end):
    event = Event()

    def rank(comm):
        x = np.ones(LARGE, np.float32)
        if comm.rank == 0:
            event.happens()
            if end == "killed":
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            else:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                comm.send(x, 1)
            return True
        time.sleep(0.5)
        with pytest.raises(PeerLost if end == "killed" else Revoked):
            comm.recv(np.empty(LARGE, np.float32), 0)
        return True

    found = run(2, rank, may_die=[0])
    assert found == [-9 if end == "killed" else True, True]

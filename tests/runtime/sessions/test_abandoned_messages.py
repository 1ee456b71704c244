"""Messages under way when a call is given up, over connections: what they refer to stays."""

import gc
import socket
import struct
import threading
import time
import weakref

import numpy as np
import pytest

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollTimeout, PeerLost
from pycoll.runtime.calls import plans
from pycoll.runtime.calls.messages import wait_any
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.startup.hosts import Card
from pycoll.types import Kind

FRAME = struct.Struct("=iIQ")  # tag, magic word, bytes
HEAD = struct.Struct("=QQQII")  # number of the call, descriptor, count, check, bytes
LANES, AGREE, MAIL, BULK_MAIL, WINDOWS = 16, 2, 3, 4, 8
MUCH = 72 << 20  # memory of this size is given back to the system at once


@pytest.fixture
def pair():
    """Return a job of two ranks, and the socket of rank 1, whom the test plays."""
    ours, theirs = socket.socketpair()
    api = _C.SocketApi([-1, ours.detach()], ["rank 0", "rank 1"])
    with theirs:
        yield MpiJob(api, None, [Card.own()] * 2, (0, 1), "TCP"), theirs
    api.close()


def session_of(job, context=0):
    return MpiSession(job, [0, 1], 0, context, Config(timeout_s=0.3))


def read(peer, nbytes):
    data = bytearray(nbytes)
    into = memoryview(data)
    while into:
        into = into[peer.recv_into(into) :]
    return data


def frames(peer):
    """Give every message that comes: its lane, its tag, the magic word, and what it says."""
    while True:
        tag, magic, nbytes = FRAME.unpack(read(peer, FRAME.size))
        yield tag % LANES, tag, magic, read(peer, nbytes)


def frames_until(peer, nbytes):
    """Give what comes up to a message of some size."""
    for frame in frames(peer):
        yield frame
        if len(frame[3]) == nbytes:
            return


def test_a_send_that_is_given_up(pair):
    """Its array has been dropped, and what was in it arrives; so does the next message."""
    job, peer = pair
    session, other = session_of(job), session_of(job, 1)
    x = np.full(MUCH, 7, np.uint8)
    kept, small = weakref.ref(x), np.full(100_000, 5, np.uint8)
    with pytest.raises(CollTimeout):
        session.send(x, 1, 0, 1e-6)
    del x
    session.close()
    del session
    gc.collect()
    assert kept() is not None
    sending = threading.Thread(target=other.send, args=(small, 1, 0, 10))
    sending.start()
    found = [data for lane, _, _, data in frames_until(peer, small.nbytes) if lane == BULK_MAIL]
    sending.join()
    assert [len(data) for data in found] == [MUCH, small.nbytes]
    assert [set(data) for data in found] == [{7}, {5}]


def test_what_failed_before_it_was_sent_is_let_go(pair):
    job, _ = pair
    session, x = session_of(job), np.zeros(MUCH, np.uint8)
    session.abort("enough")
    kept = weakref.ref(x)
    with pytest.raises(Exception, match="enough"):
        session.send(x, 1, 0, 1e-6)
    del x
    assert kept() is None


def call(session, x, later):
    result = session.call(Kind.ALL_REDUCE, x, None, "sum", 0, None, async_op=later)
    return result.wait() if later else result


@pytest.mark.parametrize("later", [False, True])
def test_a_call_that_is_given_up(pair, monkeypatch, later):
    """The rest of a message comes when its communicator has gone, and harms nothing."""
    monkeypatch.setattr(plans, "_SEGMENT_BYTES", MUCH)
    job, peer = pair
    session, other = session_of(job), session_of(job, 1)
    rest = []

    def play():
        for lane, tag, magic, data in frames(peer):
            if lane == AGREE:
                seq, descriptor, count, check, _ = HEAD.unpack(data)
                peer.sendall(FRAME.pack(tag, magic, HEAD.size))
                peer.sendall(HEAD.pack(seq, descriptor, count, check, 0))
            if lane >= WINDOWS:
                peer.sendall(FRAME.pack(tag, magic, len(data)) + data[: len(data) // 2])
                rest.extend([magic, data[len(data) // 2 :]])
                return

    peer_thread = threading.Thread(target=play)
    peer_thread.start()
    x = np.ones(MUCH // 4, np.float32)
    kept = weakref.ref(x)
    with pytest.raises(CollTimeout):
        call(session, x, later)
    peer_thread.join()
    session.close()
    del session, x
    gc.collect()
    assert kept() is not None
    y = np.zeros(2, np.int16)
    head = HEAD.pack(0, 9 << 32 | 1, 4, 0, 4)
    peer.sendall(rest[1] + FRAME.pack(LANES + MAIL, rest[0], HEAD.size + 4) + head + b"\7" * 4)
    other.recv(y, 1, 9, 5)
    assert (y == 0x0707).all()


def test_a_message_has_ended_when_its_connection_has(pair):
    """`done` says so instead of raising, and `wait` says why."""
    job, theirs = pair
    work = session_of(job).irecv(np.empty(3), 1, 4)
    assert not work.done()
    theirs.close()
    until = time.monotonic() + 5
    while not work.done():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert wait_any([work]) == 0
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        work.wait()

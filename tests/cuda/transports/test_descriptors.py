"""Descriptors that peers hand to each other, and what is refused."""

import os
import socket
import threading
import time

import pytest

from pycoll.cuda.transports.descriptors import Counter, close_all
from pycoll.errors import TransportError


def open_files():
    return len(os.listdir("/proc/self/fd"))


def meet(owned, exchange):
    """Run an exchange in a thread for each of some counters; return results or errors by rank."""
    counters = [Counter() for _ in owned]
    results = [None] * len(owned)

    def rank(r):
        try:
            results[r] = exchange(r, counters)
        except (OSError, TransportError) as error:
            results[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(owned))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for counter in counters:
        counter.close()
    return results


@pytest.mark.parametrize("n", [2, 5])
def test_everybody_gets_what_each_has(n):
    """Also where a rank has none; what arrives is the same file, and the sender may close its."""
    before = open_files()
    owned = [os.memfd_create(str(r)) if r != 1 or n == 2 else -1 for r in range(n)]
    for r, fd in enumerate(owned):
        if fd >= 0:
            os.write(fd, bytes([r]))

    def exchange(r, counters):
        peers = [p for p in range(n) if p != r and owned[p] >= 0]
        names = [counters[p].name for p in peers]
        found = counters[r].exchange(owned[r], names, n - 1 if owned[r] >= 0 else 0, 20)
        values = [os.pread(fd, 9, 0) for fd in found]
        assert not any(map(os.get_inheritable, found))
        close_all(found)
        return values == [bytes([p]) for p in peers]

    assert meet(owned, exchange) == [True] * n
    close_all(owned)
    assert open_files() == before


def test_who_does_not_come_ends_the_wait():
    before = open_files()
    gone, silent = Counter(), Counter()  # the queue of the second takes a call; nobody answers
    gone.close()
    with pytest.raises(TimeoutError):
        Counter().exchange(0, [], 1, 0.1)
    with pytest.raises(ConnectionRefusedError):
        Counter().exchange(0, [gone.name], 0, 9)
    with pytest.raises(TimeoutError):
        Counter().exchange(0, [silent.name], 0, 0.1)
    silent.close()
    assert open_files() == before


def test_what_fails_is_heard_at_once():
    """By peers that have called already, too."""

    def exchange(r, counters):
        if r == 1:
            return counters[1].exchange(-2, [counters[0].name], 1, 60)  # no such descriptor
        return counters[0].exchange(0, [counters[1].name], 1, 60)

    start = time.monotonic()
    first, second = meet([0, -2], exchange)
    assert isinstance(first, (ConnectionError, TransportError))
    assert isinstance(second, OSError)
    assert time.monotonic() - start < 20


def test_another_user_gets_nothing(monkeypatch):
    counter = Counter()
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(counter.name)
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        with pytest.raises(TransportError, match="another user"):
            counter.exchange(0, [], 1, 9)
    counter.close()


def test_a_peer_that_sends_no_descriptor():
    counter = Counter()
    other = socket.socket(socket.AF_UNIX)
    other.bind(b"\0pycoll-test-" + os.urandom(4).hex().encode())
    other.listen(1)

    def answer():
        call, _ = other.accept()
        call.sendall(b".")
        call.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(TransportError, match="no descriptor"):
        counter.exchange(0, [other.getsockname()], 0, 9)
    thread.join(10)
    counter.close(), other.close()

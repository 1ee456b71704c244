"""Connections between hosts: addresses, strangers, and messages of any size in order."""

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import oracle
from connections import connect, meet, names, somewhere
from pycoll import _C
from pycoll.config import Config
from pycoll.errors import TransportError
from pycoll.runtime.sessions.message_session import MpiJob, MpiSession
from pycoll.runtime.startup import tcp_connections
from pycoll.runtime.startup.hosts import Card
from pycoll.testing import run_processes
from pycoll.types import Kind


def test_addresses(monkeypatch):
    assert "127.0.0.1" in tcp_connections.addresses("127.0.0.1")
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    assert tcp_connections.addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "nothing0")
    with pytest.raises(TransportError, match="PYCOLL_SOCKET_IFNAME=nothing0"):
        tcp_connections.addresses()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_calls_and_messages(n):
    def body(rank, exchange):
        api = connect(exchange, rank, n)
        job = MpiJob(api, None, [Card.own()] * n, tuple(range(n)), "TCP")
        session = MpiSession(job, list(range(n)), rank, 0, Config(timeout_s=10))
        for count in (1, 100, 10_000, 1_000_000):
            x = np.arange(count, dtype=np.int64)
            got = session.call(Kind.ALL_REDUCE, x, None, "sum", 0, None)
            assert (got == n * x).all()
        for size in (0, 5, 300_000):  # not awaited by the receiver before they are sent
            if rank:
                session.send(np.full(size, rank), 0, 7, None)
            for peer in range(1, n) if rank == 0 else ():
                x = np.empty(size, np.int64)
                session.recv(x, peer, 7, None)
                assert (x == peer).all()
        session.close()
        api.close()
        api.close()
        return True

    assert meet(n, body) == [True] * n


@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_of_booleans_that_are_neither_0_nor_1(n):
    def body(rank, exchange):
        api = connect(exchange, rank, n)
        job = MpiJob(api, None, [Card.own()] * n, tuple(range(n)), "TCP")
        session = MpiSession(job, list(range(n)), rank, 0, Config(timeout_s=10))
        for op in ("and", "or", "xor", "min", "max"):
            for count in (1, 50, 100_003):
                ours, theirs = zip(*(oracle.odd_booleans(r, count) for r in range(n)), strict=True)
                got = session.call(Kind.ALL_REDUCE, ours[rank], None, op, 0, None)
                assert got.tobytes() == oracle.reduce(theirs, op).tobytes()
        session.close()
        api.close()
        return True

    assert meet(n, body) == [True] * n


def test_strangers_are_turned_away(monkeypatch):
    """Somebody knocks first, with a wrong word, and with none."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")

    def body(rank, exchange):
        def knocking(topic, own):
            places = exchange(topic, own)
            if rank == 1:
                for hello in (b"?" * 20, b"GET"):
                    with socket.create_connection(("127.0.0.1", places[0].port)) as knock:
                        knock.sendall(hello)
            return places

        connect(knocking, rank, 2).close()
        return True

    assert meet(2, body) == [True, True]


def test_a_rank_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # where nobody listens afterwards
    with pytest.raises(TransportError, match=r"cannot reach rank 0 on port .*refused"):
        tcp_connections.connect(lambda topic, own: [somewhere(port, 0), own], 1, names(2), "", 0.2)
    with pytest.raises(TransportError, match="no connection from rank 1"):
        tcp_connections.connect(lambda topic, own: [own, somewhere(port, 1)], 0, names(2), "", 0.2)


def test_what_comes_after_the_mail_of_a_rank_has_gone():
    """A large message nobody has asked for must not land in memory that others have by then."""
    nbytes = 256 << 20  # it is under way for longer than the receiver waits

    def body(rank, exchange):
        api = connect(exchange, rank, 2)
        engines = [_C.MessageEngine(api, [0, 1], rank, c, 10.0, 2) for c in (1, 2)]
        mail = [_C.MessagePostbox(engine) for engine in engines]
        data = np.full(nbytes, 7, np.uint8) if rank == 0 else np.zeros(4, np.uint8)
        exchange("ready", None)
        if rank == 0:
            mail[0].send(data.ctypes.data, nbytes, 1, 1, 0, 10.0)
            mail[1].send(data.ctypes.data, 4, 1, 1, 0, 10.0)
        else:
            with pytest.raises(_C.EngineError, match="CollTimeout"):
                mail[0].recv(data.ctypes.data, 4, 1, 0, 9, 0.02)
            mail[0] = None
            fresh = np.zeros(nbytes, np.uint8)  # likely where the message was to be
            mail[1].recv(data.ctypes.data, 4, 1, 0, 0, 10.0)
            assert (data == 7).all()
            assert not fresh.any()
        exchange("end", None)
        api.close()
        return True

    assert meet(2, body) == [True, True]


def mail_of(sockets_by_rank, rank):
    api = tcp_connections.open_api(sockets_by_rank, names(2))
    engines = [_C.MessageEngine(api, [0, 1], rank, context, 10.0, 2) for context in (1, 2)]
    return api, *map(_C.MessagePostbox, engines)


def test_no_memory_for_a_message_that_nobody_has_asked_for():
    """The receiver has an error that says so, and lives; the sender hears that it is cut off.

    Who receives looks at other mail than that which brings it, or would ask for the message.
    """
    nbytes = 256 << 20
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]

    def body(comm):
        own, other = ends[comm.rank], ends[1 - comm.rank]
        other.close()
        api, mail, other_mail = mail_of([None, own] if comm.rank == 0 else [own, None], comm.rank)
        x = np.zeros(4, np.uint8)
        if comm.rank == 0:
            data = np.ones(nbytes, np.uint8)
            comm.barrier()
            with contextlib.suppress(_C.EngineError):  # it may hear of it already
                mail.send(data.ctypes.data, nbytes, 1, 1, 3, 10.0)
            comm.barrier()
            with pytest.raises(_C.EngineError, match=r"PeerLost(.|\n)*connection has ended"):
                other_mail.recv(x.ctypes.data, 4, 1, 1, 5, 10.0)
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            comm.barrier()
            comm.barrier()
            with pytest.raises(_C.EngineError, match=r"PeerLost(.|\n)*no memory for a message"):
                other_mail.recv(x.ctypes.data, 4, 1, 0, 5, 10.0)
        comm.barrier()
        api.close()

    run_processes(2, body, timeout=40)
    for end in ends:
        end.close()


def test_a_connection_that_takes_no_more():
    """A message may be half there: the rest of the connection is of no use to either end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    broken, (api, mail, _) = ends[0].dup(), mail_of([None, ends[0]], 0)
    broken.shutdown(socket.SHUT_WR)
    broken.close()
    x = np.zeros(4, np.uint8)
    mail.send(x.ctypes.data, 4, 1, 1, 3, 10.0)
    with pytest.raises(_C.EngineError, match=r"PeerLost(.|\n)*connection has ended"):
        mail.recv(x.ctypes.data, 4, 1, 1, 5, 5.0)
    api.close()
    ends[1].close()


def test_two_threads_receive_at_once():
    def body(rank, exchange):
        api = connect(exchange, rank, 2)
        engine = _C.MessageEngine(api, [0, 1], rank, 1, 10.0, 2)
        mail, x = _C.MessagePostbox(engine), np.zeros(4, np.uint8)
        if rank == 0:
            exchange("waiting", None)
            for tag in (1, 0):
                x[:] = 5 + tag
                mail.send(x.ctypes.data, 4, 1, 1, tag, 10.0)
        else:
            first = threading.Thread(target=mail.recv, args=(x.ctypes.data, 4, 1, 0, 0, 10.0))
            first.start()
            time.sleep(0.1)
            exchange("waiting", None)
            y = np.zeros(4, np.uint8)
            mail.recv(y.ctypes.data, 4, 1, 0, 1, 10.0)
            first.join()
            assert (x == 5).all()
            assert (y == 6).all()
        exchange("end", None)
        api.close()
        return True

    assert meet(2, body) == [True, True]


def test_two_threads_wait_for_one_message():
    """One of them would look at what the other one has forgotten."""

    def body(rank, exchange):
        api = connect(exchange, rank, 2)
        box = _C.MessagePostbox(_C.MessageEngine(api, [0, 1], rank, 1, 10.0, 2))
        x, senders = np.zeros(4, np.uint8), []
        if rank == 0:
            exchange("refused", None)
            box.send(x.ctypes.data, 4, 1, 1, 0)
        else:
            ticket = box.recv(x.ctypes.data, 4, 1, 0, 0)
            first = threading.Thread(target=lambda: senders.append(box.wait(ticket, 10.0)))
            first.start()
            time.sleep(0.1)
            with pytest.raises(_C.EngineError, match="ConcurrentUseError"):
                box.wait(ticket, 0.5)
            exchange("refused", None)
            first.join()
        exchange("end", None)
        api.close()
        return senders

    assert meet(2, body) == [[], [0]]


def test_forked_children_drop_a_postbox_that_a_thread_uses():
    """The thread may have its lock at that moment; in the child nobody gives that back."""

    def body(rank, exchange):
        api = connect(exchange, rank, 2)
        box = _C.MessagePostbox(_C.MessageEngine(api, [0, 1], rank, 1, 10.0, 2))
        x, over = np.zeros(4, np.uint8), threading.Event()
        ticket = box.recv(x.ctypes.data, 4, 1, 1 - rank, 0)

        def look():
            while not over.is_set():
                box.done(ticket)

        codes = []
        if rank == 0:
            looking = [threading.Thread(target=look) for _ in range(3)]
            for thread in looking:
                thread.start()
            for _ in range(20):
                pid = os.fork()
                if pid == 0:
                    signal.alarm(10)
                    box.close()
                    os._exit(0)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            over.set()
            for thread in looking:
                thread.join()
        exchange("end", None)
        api.close()
        return codes

    assert meet(2, body) == [[0] * 20, []]

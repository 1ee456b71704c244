"""Ranks that call each other: strangers, addresses that lead nowhere, and ranks that fail."""

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import threading
import time

import pytest

from connections import connect, meet, names, signed, somewhere
from pycoll.errors import TransportError
from pycoll.runtime.startup import tcp_connections, tcp_handshake
from pycoll.runtime.startup.tcp_handshake import Handshakes
from pycoll.runtime.startup.tcp_proofs import Proofs


def outcomes(n, limit_s, words=None, board=None):
    """Connect n ranks; return what each raised, or "". ``words``: what a rank says of itself."""

    def body(rank, exchange):
        def saying(topic, own):
            return exchange(topic, signed(words(rank, own), rank) if words else own)

        try:
            found = tcp_connections.connect(saying, rank, names(n), "", limit_s, board)
        except (TransportError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
        for connection in filter(None, found):
            connection.close()
        return ""

    return meet(n, body)


def test_strangers_who_say_nothing(monkeypatch):
    """They cost those who wait behind them no time."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    idle = []

    def body(rank, exchange):
        def knocking(topic, own):
            places = exchange(topic, own)
            if rank == 1:
                way = ("127.0.0.1", places[0].port)
                idle.extend(socket.create_connection(way) for _ in range(5))
            return places

        connect(knocking, rank, 2).close()
        return True

    assert meet(2, body) == [True, True]
    for connection in idle:
        connection.close()


def test_a_stranger_who_knocks_again_and_again(monkeypatch):
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    over, knocking = threading.Event(), []

    def knock(port):
        while not over.wait(0.03):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()

    def alone(topic, own):
        knocking.append(threading.Thread(target=knock, args=(own.port,)))
        knocking[0].start()
        return [own, somewhere(1, 1)]

    threading.Timer(10, over.set).start()
    with pytest.raises(TransportError, match="no connection from rank 1"):
        tcp_connections.connect(alone, 0, names(2), "", 0.5)
    assert not over.is_set()
    over.set()
    knocking[0].join()


class Server(socket.socket):
    """Listens, but has no descriptor for a call when it is told so."""

    full = False

    def accept(self):
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.mark.parametrize("full", [False, True])
def test_a_stranger_who_hangs_up_when_another_takes_its_place(monkeypatch, full):
    """There are as many as there may be. The oldest is dropped, and is heard in the same moment."""
    monkeypatch.setattr(tcp_handshake, "_CALL_S", 20.0)
    server, held, looks = Server(), [], iter(range(100))
    server.bind(("127.0.0.1", 0))
    server.listen(128)
    places = [somewhere(1, rank) for rank in range(2)]

    def meanwhile():  # who has given up is asked between two looks at all connections
        look = next(looks)
        count = tcp_handshake._MOST_STRANGERS + len(places) if look == 0 else int(look == 5)
        held.extend(socket.create_connection(server.getsockname()) for _ in range(count))
        if look == 5:
            server.full = full
            held.pop(0).close()
        return ""

    rank_0 = Handshakes(server, places, 0, names(2), Proofs("", 0, names(2)))
    with pytest.raises(TransportError, match="no connection from rank 1"):
        rank_0.run(1.5, tcp_handshake.SpareDescriptors(), meanwhile)
    assert next(looks) > 5
    rank_0.close()
    for line in (*held, server):
        line.close()


def test_an_address_where_somebody_says_nothing(monkeypatch):
    """It costs a part of the time, and the next address is tried."""
    monkeypatch.setattr(
        tcp_connections,
        "_listen",
        lambda n, where: socket.create_server(("127.0.0.1", 0), backlog=n),
    )
    silent = []

    def words(rank, own):
        if rank == 0:
            silent.append(socket.create_server(("127.0.0.2", own.port)))
        return own._replace(addresses=["127.0.0.2", "127.0.0.1"])

    assert outcomes(2, 4, words) == ["", ""]
    assert outcomes(
        2, 4, lambda r, own: own._replace(addresses=["fe80::1%none0", "127.0.0.1"])
    ) == [
        "",
        "",
    ]
    silent[0].close()


def test_all_ranks_are_connected_or_none(monkeypatch):
    """Rank 2 cannot reach rank 1; rank 0 has its connections."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    first, second, third = outcomes(
        3, 1, lambda r, own: own._replace(port=own.port if r != 1 else 1)
    )
    assert "cannot reach all other ranks" in first or "has given up" in first
    assert "no connection from rank 2" in second or "has given up" in second
    assert "cannot reach rank 1 on port 1" in third or "has given up" in third


class Board(dict):
    """Where ranks tell each other, as in a store of PyTorch."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def test_a_rank_that_fails_tells_the_others(monkeypatch):
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    run = Handshakes.run

    def interrupted(self, *given):
        if self._rank == 0:
            raise KeyboardInterrupt
        run(self, *given)

    monkeypatch.setattr(Handshakes, "run", interrupted)
    first, *others = outcomes(3, 50, board=Board())
    assert first == "KeyboardInterrupt: "
    assert others == ["TransportError: rank 0 cannot join: KeyboardInterrupt"] * 2


def test_a_rank_that_fails_tells_before_it_hangs_up(monkeypatch):
    """Rank 1 sees the connection end, and has looked at the board just before."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    tell = Handshakes._announce

    def interrupted(self):
        if self._rank == 0 and self.found:
            raise KeyboardInterrupt
        tell(self)

    class Slow(Board):
        def set(self, key, value):
            time.sleep(0.5)
            super().set(key, value)

    monkeypatch.setattr(Handshakes, "_announce", interrupted)
    first, second = outcomes(2, 20, board=Slow())
    assert first == "KeyboardInterrupt: "
    assert second == "TransportError: rank 0 cannot join: KeyboardInterrupt"


def test_a_rank_that_hangs_up_because_of_a_third():
    """The reason is on the board by then, whenever that was looked at last."""
    told, proofs = [], [Proofs("", rank, names(2)) for rank in range(2)]

    def gives_up():
        line, _ = server.accept()
        hello = line.recv(tcp_handshake._HELLO.size, socket.MSG_WAITALL)
        _, rank, challenge = tcp_handshake._HELLO.unpack(hello)
        line.sendall(bytes(32) + proofs[0].answer(0, rank, challenge + bytes(32)))
        line.recv(1)
        told.append("rank 2 cannot join")
        line.close()

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("", 0)) as own:
        places = [somewhere(server.getsockname()[1], rank) for rank in range(2)]
        for each in proofs:
            each.check(places)
        rank_0 = threading.Thread(target=gives_up)
        rank_0.start()
        rank_1 = Handshakes(own, places, 1, names(2), proofs[1])
        spare = tcp_handshake.SpareDescriptors()
        with pytest.raises(TransportError, match="rank 2 cannot join"):
            rank_1.run(20, spare, lambda: "".join(told))
        rank_0.join()
        spare.fill(0)
        rank_1.close()
        rank_1.found[0].close()


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_for_longer_than_a_call_may_take(monkeypatch, stopped, step):
    """After any step with the other one: what has come meanwhile counts."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(tcp_handshake, "_CALL_S", 0.3)
    go_on, steps = Handshakes._advance, []

    def slow(self, call):
        go_on(self, call)
        if self._rank == stopped:
            steps.append(call)
            if len(steps) == step:
                time.sleep(0.8)

    monkeypatch.setattr(Handshakes, "_advance", slow)
    assert outcomes(2, 20) == ["", ""]
    assert len(steps) >= step


def exchange_by_files(folder, rank, n):
    """Return an exchange between processes."""

    def exchange(topic, value):
        (folder / f"new{rank}").write_text(json.dumps(value))
        (folder / f"new{rank}").rename(folder / f"{topic}{rank}")
        paths = [folder / f"{topic}{r}" for r in range(n)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    return exchange


@pytest.mark.parametrize("left", range(8))
def test_too_few_descriptors(monkeypatch, tmp_path, left):
    """Rank 0 may open so many files: it needs one to listen, two for others, four for itself."""
    monkeypatch.setenv("PYCOLL_SOCKET_IFNAME", "lo")
    children = []
    for rank in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(20)
            text = joined_with_few(tmp_path, rank, 3, left if rank == 0 else 100)
            (tmp_path / f"said{rank}").write_text(text)
            os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 3
    first, *others = [(tmp_path / f"said{rank}").read_text() for rank in range(3)]
    if left == 7:
        assert (first, *others) == ("", "", "")
    else:
        assert "Too many open files; raise the limit of open files (ulimit -n)" in first
        assert others == [f"rank 0 cannot join: {first}"] * 2


def joined_with_few(folder, rank, n, left):
    exchange = exchange_by_files(folder, rank, n)

    def unlimited(topic, value):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        found = exchange(topic, value)
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        return found

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(left + 1)]  # in between some may be in use
    few = free[-1]
    list(map(os.close, free))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        tcp_connections.open_api(
            tcp_connections.connect(unlimited, rank, names(n), "", 10), names(n)
        ).close()
    except TransportError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return ""

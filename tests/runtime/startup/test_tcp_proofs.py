"""Who can read the store cannot pose as a rank: both ends prove that they know the secret."""

import socket
import threading
import time

import pytest

from connections import meet, names, signed
from pycoll.errors import TransportError
from pycoll.runtime.startup import tcp_connections
from pycoll.runtime.startup.tcp_handshake import _ANSWER, _HELLO
from pycoll.runtime.startup.tcp_proofs import Endpoint, Proofs, new_word

SECRET, OTHER = "what only the ranks know", "what somebody believes it is"


def join(secrets, said=lambda rank, places: places, limit_s=10):
    """Connect ranks with these secrets; return what each raised, or "", and when."""

    def body(rank, exchange):
        def saying(topic, own):
            return said(rank, exchange(topic, own))

        own, start = secrets[rank], time.monotonic()
        try:
            found = tcp_connections.connect(
                saying, rank, names(len(secrets)), "", limit_s, secret=own, one_host=True
            )
        except TransportError as error:
            return str(error), time.monotonic() - start
        for connection in filter(None, found):
            connection.close()
        return "", time.monotonic() - start

    return meet(len(secrets), body)


def test_one_secret():
    assert [text for text, _ in join([SECRET] * 3)] == [""] * 3


OF = "PYCOLL_SECRET of "
UNLIKE = {
    (SECRET, OTHER): [f"{OF}rank 0 is not that of rank 1", f"{OF}rank 1 is not that of rank 0"],
    (SECRET, SECRET, OTHER): [
        f"{OF}rank 0 is not that of rank 2",
        f"{OF}rank 1 is not that of rank 2",
        f"{OF}rank 2 is not that of rank 0, rank 1",
    ],
    (SECRET, ""): ["PYCOLL_SECRET is set on rank 0, and not on rank 1"] * 2,
}


@pytest.mark.parametrize("secrets", UNLIKE)
def test_another_secret_is_an_error_on_every_rank_at_once(secrets):
    for (text, seconds), told in zip(join(secrets), UNLIKE[secrets], strict=True):
        assert told in text
        assert "set it to the same text for every rank" in text
        assert seconds < 5


def test_an_entry_that_somebody_has_changed():
    def changed(rank, places):
        return [places[0]._replace(port=places[0].port ^ 1), *places[1:]]

    for (text, _), whose in zip(join([SECRET] * 2, changed), (0, 0), strict=True):
        assert f"is not that of rank {whose}, or somebody has changed" in text


def whole_table():
    """Return the places of two ranks, as the store has them, and their proofs."""
    ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    places = [
        signed(Endpoint(end.getsockname()[1], ["127.0.0.1"], new_word()), rank, SECRET)
        for rank, end in enumerate(ends)
    ]
    return ends, places


def outsider(places):
    """Return what somebody makes of a table without knowing the secret; he skips the check."""
    made, known = Proofs(OTHER, 0, names(2)), Proofs(SECRET, 0, names(2))
    known.check(places)
    made._table = known._table  # it is no secret: a checksum of what the store has
    return made


def test_a_caller_who_knows_the_store_is_no_rank():
    """It has the word, the number and the table; it fails to answer, and rank 1 gets its place."""
    turned_away = []

    def knock(places):
        with socket.create_connection(("127.0.0.1", places[0].port)) as line:
            line.sendall(_HELLO.pack(bytes.fromhex(places[0].word), 1, bytes(32)))
            other, _ = _ANSWER.unpack(line.recv(_ANSWER.size, socket.MSG_WAITALL))
            line.sendall(outsider(places).confirm(0, 1, bytes(32) + other))
            turned_away.append(line.recv(1))

    def body(rank, exchange):
        def saying(topic, own):
            places = exchange(topic, own)
            if rank == 1:  # rank 0 answers meanwhile
                knock(places)
            return places

        found = tcp_connections.connect(saying, rank, names(2), "", 10, secret=SECRET)
        with found[1 - rank] as line:
            line.setblocking(True)
            line.sendall(b"x")
            assert line.recv(1) == b"x"
        return True

    assert meet(2, body) == [True, True]
    assert turned_away == [b""]


@pytest.mark.parametrize("replayed", [False, True])
def test_one_who_listens_in_the_place_of_a_rank(replayed):
    """It answers as it can, or as rank 0 has answered somebody before: rank 1 hangs up."""
    seen, over = [], threading.Event()

    def poses(server, places):
        server.settimeout(0.1)
        while not over.is_set():
            try:
                line, _ = server.accept()
            except TimeoutError:
                continue
            hello = line.recv(_HELLO.size, socket.MSG_WAITALL)
            said = outsider(places).answer(0, 1, hello[-32:] + bytes(32))
            if replayed:  # an answer of rank 0 itself, to another challenge
                rank_0 = Proofs(SECRET, 0, names(2))
                rank_0.check(places)
                said = rank_0.answer(0, 1, bytes(64))
            line.sendall(bytes(32) + said)
            seen.append(line.recv(1))
            line.close()

    ends, places = whole_table()
    thread = threading.Thread(target=poses, args=(ends[0], places))
    thread.start()

    def exchange(topic, own):
        places[1] = own
        return places

    try:
        with pytest.raises(TransportError, match="another process listens there"):
            tcp_connections.connect(exchange, 1, names(2), "", 1, secret=SECRET, one_host=True)
    finally:
        over.set()
        thread.join()
    assert seen
    assert set(seen) == {b""}
    for end in ends:
        end.close()


def test_an_answer_fits_nowhere_else():
    """Not another role, rank, challenge or table."""
    ends, places = whole_table()
    proofs = Proofs(SECRET, 0, names(2))
    proofs.check(places)
    fresh = Proofs(SECRET, 0, names(2))
    fresh.check([signed(p._replace(word=new_word()), r, SECRET) for r, p in enumerate(places)])
    said = {
        proofs.answer(0, 1, bytes(64)),
        proofs.confirm(0, 1, bytes(64)),
        proofs.answer(1, 0, bytes(64)),
        proofs.answer(0, 1, bytes(63) + b"\1"),
        fresh.answer(0, 1, bytes(64)),
    }
    assert len(said) == 5
    for end in ends:
        end.close()


def test_nobody_outside_this_host_can_call():
    """Where all ranks share a host they listen on the loopback interface only."""
    outside = [a for a in tcp_connections.addresses() if ":" not in a and a != "127.0.0.1"]

    def body(rank, exchange):
        def looking(topic, own):
            places = exchange(topic, own)
            for address in outside:
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection((address, own.port), 2)
            return places

        found = tcp_connections.connect(looking, rank, names(2), "", 10, one_host=True)
        found[1 - rank].close()
        return True

    assert meet(2, body) == [True, True]

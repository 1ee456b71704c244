"""Whatever comes where a rank should speak: a caller is a rank, or is turned away."""

import contextlib
import socket

import pytest

from connections import names, signed
from mutate import cases, mutated, mutated_bytes, seeds
from pycoll.errors import TransportError
from pycoll.runtime.startup.tcp_handshake import _ANSWER, _HELLO, Handshakes, _Pending
from pycoll.runtime.startup.tcp_proofs import Endpoint, Proofs, new_word

SECRET = "what only the ranks know"
CHALLENGE = b"c" * 32


@pytest.fixture(scope="module")
def table():
    places = [
        signed(Endpoint(4000 + rank, ["127.0.0.1", "::1"], new_word()), rank, SECRET)
        for rank in range(3)
    ]
    proofs = Proofs(SECRET, 0, names(3))
    proofs.check(places)
    return places, proofs


@pytest.fixture(scope="module")
def server():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def conversation(server, rank, table, start, lines):
    """Let a rank take part in a handshake in which the other end says these lines; who was found.

    A line is bytes, or makes bytes of the answer to the one before.
    """
    places, proofs = table
    calls = Handshakes(server, places, rank, names(3), proofs)
    own, other = socket.socketpair()
    call = calls._calls[own] = _Pending(own, 1e9, *((0, "::1") if start == "_greet" else ()))
    calls._turns.clear()
    call.steps = getattr(calls, start)(call)
    calls._advance(call)
    said = b""
    for line in lines:
        with contextlib.suppress(OSError):  # it has been turned away
            other.sendall(line(said) if callable(line) else line)
        if own.fileno() >= 0:
            calls._advance(call)
        with contextlib.suppress(OSError):
            said = other.recv(1000, socket.MSG_DONTWAIT)
    found = set(calls.found)
    for line in (own, other, *calls.found.values()):
        line.close()
    calls.close()
    return found


def test_calls(server, table):
    places, proofs = table
    hello = _HELLO.pack(bytes.fromhex(places[0].word), 2, CHALLENGE)

    def confirm(answer):
        return proofs.confirm(0, 2, CHALLENGE + answer[:32])

    assert conversation(server, 0, table, "_answer", [hello, confirm]) == {2}
    for seed, rng in cases(500):
        changed = mutated_bytes(hello, rng)
        second = rng.random() < 0.5 or changed[: len(hello)] == hello

        def odd(answer, rng=rng):
            return mutated_bytes(confirm(answer), rng)

        lines = [hello, odd] if second else [changed, confirm]
        found = conversation(server, 0, table, "_answer", lines)
        # More may follow what is right: the next thing that a rank says is that it is ready.
        assert found == set() or (second and found == {2}), f"seed {seed}"


def test_answers(server, table):
    made = Proofs(SECRET, 1, names(3))
    made.check(table[0])
    own = (table[0], made)

    def answer(hello):
        return _ANSWER.pack(CHALLENGE, made.answer(0, 1, hello[-32:] + CHALLENGE))

    begin = lambda hello: b""  # noqa: E731 - it speaks first
    assert conversation(server, 1, own, "_greet", [begin, answer]) == {0}
    for seed, rng in cases(500):

        def odd(hello, rng=rng):
            data = answer(hello)
            changed = mutated_bytes(data, rng)
            return changed if changed[: len(data)] != data else b""

        assert conversation(server, 1, own, "_greet", [begin, odd]) == set(), f"seed {seed}"


def test_what_the_store_says(table):
    """It is refused in words, or is what the ranks have written."""
    places, proofs = table
    rows = [list(place) for place in places]
    refused = 0
    for seed, rng in cases():
        changed = mutated(rows, rng)
        try:
            assert isinstance(changed, list)  # as the exchange makes it
            read = [Endpoint.read(row) for row in changed]
            Proofs(SECRET, 0, names(len(read))).check(read)
        except (TransportError, AssertionError):
            refused += 1
        else:
            assert read == places[: len(read)], f"seed {seed}"
    assert refused > 0.5 * len(seeds())
    proofs.check(places)

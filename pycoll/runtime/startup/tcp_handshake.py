"""The TCP handshake: ranks dial each other, all at once, until every pair is connected.

The dialling rank sends the word of the rank that it dials, its own number and a challenge; the
other answers that, with a challenge of its own. By its answer the dialling rank then confirms that
it keeps this connection, for it may have tried several addresses. A rank that has all its
connections says so on each, and goes on when all others have said so. So what keeps one rank from
being connected is an error on all of them, and callers that do not know the word, or not the secret
behind the answers (`tcp_proofs.py`), cost no time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence

from pycoll.errors import TransportError
from pycoll.runtime.startup.tcp_proofs import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    Endpoint,
    Proofs,
    same,
)

_HELLO = struct.Struct(f"!16sI{CHALLENGE_BYTES}s")  # word of the dialled rank, who dials, challenge
_ANSWER = struct.Struct(f"!{CHALLENGE_BYTES}s{PROOF_BYTES}s")
_READY = b"\x07"
_CALL_S = 3.0  # until two who have just been connected have agreed
_FOREVER = float("inf")
_PAUSE_S = 0.1
_MOST_STRANGERS = 64  # at a time
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)

Steps = Generator[int, None, None]  # of an agreement; they say which event they wait for


class SpareDescriptors:
    """Descriptors kept free for connections, so that a rank finds out early that it lacks some."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def fill(self, count: int) -> None:
        """Hold as many as this."""
        while len(self._held) < count:
            self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(self._held) > max(0, count):
            os.close(self._held.pop())

    def give(self) -> None:
        """Let go of one, for a file that is opened now."""
        self.fill(len(self._held) - 1)


def too_few_files(error: OSError) -> str:
    """Say what to do where no descriptor is left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"connections to all other ranks need one open file each: {error.strerror}; raise the "
        f"limit of open files (ulimit -n), which is {limit}"
    )


class _Pending:
    """A connection about which both ends have not agreed yet.

    Attributes:
        line: Its socket.
        until: When to give it up.
        peer: Who is dialled, or has proved who it is; -1 for a stranger.
        address: Which one is dialled; empty on the other end.
    """

    def __init__(
        self, line: socket.socket, until: float, peer: int = -1, address: str = ""
    ) -> None:
        self.line, self.until, self.peer, self.address = line, until, peer, address
        self.steps: Steps
        line.setblocking(False)

    def read(self, nbytes: int) -> Generator[int, None, bytes]:
        data = b""
        while len(data) < nbytes:
            yield selectors.EVENT_READ
            with contextlib.suppress(BlockingIOError):
                part = self.line.recv(nbytes - len(data))
                if not part:
                    raise ConnectionError("another process listens there, or it hung up")
                data += part
        return data


class Handshakes:
    """The handshakes of one rank with all others.

    Attributes:
        found: The connection to each rank that is agreed on.
    """

    def __init__(
        self,
        server: socket.socket,
        places: Sequence[Endpoint],
        rank: int,
        names: Sequence[str],
        proofs: Proofs,
    ) -> None:
        self._server, self._places, self._rank, self._names = server, places, rank, names
        self._proofs = proofs  # has checked the places
        self.found: dict[int, socket.socket] = {}
        self._ready: set[int] = set()
        self._announced = False
        self._calls: dict[socket.socket, _Pending] = {}
        self._turns = {peer: (0.0, 0) for peer in range(rank)}  # when to dial which address
        self._tried: dict[int, dict[str, str]] = {peer: {} for peer in range(rank)}
        self._selector = selectors.PollSelector()  # has no descriptor of its own
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)

    def run(self, limit_s: float, spare: SpareDescriptors, given_up: Callable[[], str]) -> None:
        """Call and answer until all ranks are ready.

        Raises:
            TransportError: If a rank cannot be reached, with the addresses that were tried.
        """
        others, until, next_look = len(self._places) - 1, time.monotonic() + limit_s, 0.0
        self._given_up = given_up
        while len(self._ready) < others:
            now = time.monotonic()
            if now >= until:
                raise TransportError(self._who_is_missing())
            if now >= next_look:
                next_look = now + _PAUSE_S
                if why := given_up():
                    raise TransportError(why)
            with contextlib.suppress(OSError):
                spare.fill(others + 2 - len(self.found) - len(self._calls))
            for peer in [p for p, (when, _) in self._turns.items() if now >= when]:
                self._dial(peer, now, limit_s, spare)
            for key, _ in self._selector.select(max(0, min(_PAUSE_S, until - now))):
                if key.fileobj is self._server:
                    self._accept(now, spare)
                elif key.data.line.fileno() >= 0:  # it was not dropped for one who came just now
                    self._advance(key.data)
            for call in [c for c in self._calls.values() if now >= c.until]:
                self._drop(call, "no answer")  # nor has one come while this rank was stopped
            self._announce()

    def close(self) -> None:
        """Close all connections that are not agreed on."""
        for call in [*self._calls.values()]:
            self._drop(call, "")
        self._selector.close()

    def _dial(self, peer: int, now: float, limit_s: float, spare: SpareDescriptors) -> None:
        place, (_, index) = self._places[peer], self._turns.pop(peer)
        address = place.addresses[index % len(place.addresses)]
        patience = min(_CALL_S, limit_s / (2 * len(place.addresses)))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        spare.give()
        try:
            line = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                raise TransportError(too_few_files(error)) from error
            self._next_address(peer, address, str(error))
            return
        call = self._calls[line] = _Pending(line, now + patience, peer, address)
        call.steps = self._greet(call)
        try:
            with contextlib.suppress(BlockingIOError):
                line.connect((address, place.port))
        except OSError as error:  # there may be no such address here
            self._drop(call, error.strerror or str(error))
        else:
            self._advance(call)

    def _next_address(self, peer: int, address: str, why: str) -> None:
        self._tried[peer][address] = why
        addresses = self._places[peer].addresses
        index = addresses.index(address) + 1
        pause = _PAUSE_S if index == len(addresses) else 0.0
        self._turns[peer] = time.monotonic() + pause, index

    def _accept(self, now: float, spare: SpareDescriptors) -> None:
        """Accept a connection, in place of the oldest unknown one if there are too many."""
        spare.give()
        # Those who know the word, and have yet to prove who they are, come last.
        strangers = sorted((c for c in self._calls.values() if c.peer < 0), key=lambda c: c.until)
        try:
            line, _ = self._server.accept()
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                if not strangers or strangers[0].until == _FOREVER:
                    raise TransportError(too_few_files(error)) from error
                self._drop(strangers[0], "")
            return  # who called has hung up already, or is taken next time
        if len(strangers) >= _MOST_STRANGERS + len(self._places):
            self._drop(strangers[0], "")
        call = self._calls[line] = _Pending(line, now + _CALL_S)
        call.steps = self._answer(call)
        self._advance(call)

    def _advance(self, call: _Pending) -> None:
        """Take the next step of a handshake."""
        try:
            event = next(call.steps)
        except StopIteration:
            self._selector.unregister(call.line)
        except OSError as error:
            self._drop(call, error.strerror or str(error))
        else:
            with contextlib.suppress(KeyError):
                self._selector.unregister(call.line)
            self._selector.register(call.line, event, call)

    def _drop(self, call: _Pending, why: str) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.line)
        del self._calls[call.line]
        call.line.close()
        if call.address:
            self._next_address(call.peer, call.address, why)

    def _greet(self, call: _Pending) -> Steps:
        yield selectors.EVENT_WRITE
        if failed := call.line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(failed, os.strerror(failed))
        word, own = (
            bytes.fromhex(self._places[call.peer].word),
            secrets.token_bytes(CHALLENGE_BYTES),
        )
        call.line.send(_HELLO.pack(word, self._rank, own))
        other, said = _ANSWER.unpack((yield from call.read(_ANSWER.size)))
        about = call.peer, self._rank, own + other
        if not same(said, self._proofs.answer(*about)):
            raise ConnectionError("another process listens there")
        call.line.send(self._proofs.confirm(*about))
        yield from self._agreed(call)

    def _answer(self, call: _Pending) -> Steps:
        word, peer, other = _HELLO.unpack((yield from call.read(_HELLO.size)))
        known = same(word, bytes.fromhex(self._places[self._rank].word))
        if not known or not self._rank < peer < len(self._places):
            raise ConnectionError("a stranger")
        call.until = _FOREVER  # it hangs up itself if it takes another way
        own = secrets.token_bytes(CHALLENGE_BYTES)
        about = self._rank, peer, other + own
        call.line.send(_ANSWER.pack(own, self._proofs.answer(*about)))
        if not same((yield from call.read(PROOF_BYTES)), self._proofs.confirm(*about)):
            raise ConnectionError("a stranger")
        call.peer = peer
        yield from self._agreed(call)

    def _agreed(self, call: _Pending) -> Steps:
        if call.peer in self.found:
            raise ConnectionError("two connections")
        del self._calls[call.line]
        self.found[call.peer] = call.line
        try:
            if (yield from call.read(len(_READY))) != _READY:
                raise ConnectionError("it says something else than that it is ready")
        except OSError:
            raise self._gone(call.peer) from None
        self._ready.add(call.peer)

    def _announce(self) -> None:
        """Tell all others that this rank has all its connections."""
        if self._announced or len(self.found) < len(self._places) - 1:
            return
        self._announced = True
        for peer, line in self.found.items():
            try:
                line.send(_READY)
            except OSError:
                raise self._gone(peer) from None

    def _gone(self, peer: int) -> TransportError:
        """Say why a rank has hung up: a third one may be to blame, which has said so before."""
        with contextlib.suppress(Exception):  # the store may have gone with the rank
            if why := self._given_up():
                return TransportError(why)
        return TransportError(f"{self._names[peer]} has given up or died")

    def _who_is_missing(self) -> str:
        for peer in range(self._rank):
            if peer not in self.found:
                tried = "; ".join(f"{a}: {why}" for a, why in self._tried[peer].items())
                return (
                    f"rank {self._rank} cannot reach {self._names[peer]} on port "
                    f"{self._places[peer].port}: {tried or 'no answer'}. Name the "
                    "network interface to use in PYCOLL_SOCKET_IFNAME on every host"
                )
        ranks = [r for r in range(len(self._places)) if r != self._rank and r not in self._ready]
        if unseen := ", ".join(self._names[r] for r in ranks if r not in self.found):
            return f"no connection from {unseen} has come"
        return f"{', '.join(self._names[r] for r in ranks)} cannot reach all other ranks"

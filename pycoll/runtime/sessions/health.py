"""Do all ranks answer, do they agree, and does each reach each other: `Communicator.check`."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.algorithms import ALGORITHMS
from pycoll.config import VERSION, check_timeout
from pycoll.errors import CollError, MismatchError, TransportError
from pycoll.runtime.calls.parts.exchange import exchange_texts
from pycoll.runtime.sessions.reports import blame
from pycoll.runtime.sessions.session import Session
from pycoll.types import DType, Kind

TAG = 2**32 - 1  # of the messages of a check; those of users end at 2**31 - 1
PINGS = 3


@dataclass(frozen=True)
class Peer:
    """What a check found out about one rank.

    Attributes:
        rank: The rank.
        pid, host: Its process, and the name of the host on which that runs.
        transport: How messages reach it from here; empty for this rank itself.
        latency_s: Half the time of the fastest of a few round trips, in seconds.
    """

    rank: int
    pid: int
    host: str
    transport: str
    latency_s: float


@dataclass(frozen=True)
class Health:
    """What `Communicator.check` found; all of it is well.

    Attributes:
        rank: This rank.
        transport: How the ranks of the communicator reach each other, in words.
        hosts: Number of the host of each rank, counted from 0 in rank order; ranks that share no
            memory count as hosts.
        iteration: Number of the communicator's next iteration, the same on every rank.
        version: Version of pycoll, the same on every rank.
        selection: Digest of what tuning has changed in the choice of algorithms; empty if nothing.
        peers: Every rank, in rank order.
        seconds: How long the check took.
    """

    rank: int
    transport: str
    hosts: tuple[int, ...]
    iteration: int
    version: str
    selection: str
    peers: tuple[Peer, ...]
    seconds: float

    @property
    def slowest(self) -> Peer:
        """The rank that answered slowest."""
        return max(self.peers, key=lambda peer: peer.latency_s)

    def __str__(self) -> str:
        slow = self.slowest
        far = f"; rank {slow.rank} answers slowest, {slow.latency_s * 1e6:.3g} us" * (
            slow.rank != self.rank
        )
        ranks, hosts = _several(len(self.peers), "rank"), _several(max(self.hosts) + 1, "host")
        return (
            f"rank {self.rank}: {ranks} on {hosts} {'are' if len(self.peers) > 1 else 'is'} well "
            f"({self.transport}), iteration {self.iteration}, checked in {self.seconds:.3g} s{far}"
        )


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def check(session: Session, timeout: float | None = None) -> Health:
    """See `pycoll.Communicator.check`."""
    start = time.monotonic()
    usual = session.config.timeout_s
    limit = session.refusing(lambda: usual if timeout is None else check_timeout(timeout))

    def left() -> float:
        return max(1e-3, start + limit - time.monotonic())

    hosts = session.hosts
    try:
        return _examine(session, hosts, start, left)
    except CollError:
        raise
    except BaseException as error:  # an interrupt ends the communicator, as it does inside a call
        session.interrupted(error)
        raise


def _examine(
    session: Session, hosts: tuple[int, ...], start: float, left: Callable[[], float]
) -> Health:
    _settle(session, left)
    iteration = session.engine.iteration
    facts = _facts(session, hosts, iteration)
    card = "\n".join([*facts.values(), *_about_us()])
    cards = [text.split("\n") for text in exchange_texts(session, Kind.CHECK, card, left())]
    _compare(list(facts), cards)
    latency = np.zeros(session.world_size)
    for peer in partners(session.rank, session.world_size):
        latency[peer] = _reach(session, peer, iteration, left)
    peers = [
        Peer(r, int(card[-2]), card[-1], _way(session, r), float(latency[r]))
        for r, card in enumerate(cards)
    ]
    return Health(
        rank=session.rank,
        transport=session.transport,
        hosts=hosts,
        iteration=iteration,
        version=VERSION,
        selection=facts["table of the selector"],
        peers=tuple(peers),
        seconds=time.monotonic() - start,
    )


def _settle(session: Session, left: Callable[[], float]) -> None:
    """Let the calls in the background end, so that the iterations can be compared."""
    if hasattr(session, "settle"):
        session.settle(left())
    session.sweep()
    while session._in_flight and left() > 1e-3:  # else the exchange reports the late rank
        time.sleep(1e-4)
        session.sweep()


def _facts(session: Session, hosts: tuple[int, ...], iteration: int) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    registry = "".join(f"{a.collective}/{a.name} " for a in ALGORITHMS)
    return {
        "version of pycoll": VERSION,
        "registry of algorithms": f"{zlib.crc32(registry.encode()):08x}",
        "table of the selector": session.tuning.digest if session.tuning else "",
        "map of ranks to hosts": f"{zlib.crc32(repr(hosts).encode()):08x}",
        "iteration": str(iteration),
    }


def _about_us() -> tuple[str, str]:
    return str(os.getpid()), socket.gethostname()[:64]


def _compare(names: list[str], cards: list[list[str]]) -> None:
    """Raise on every rank alike if the ranks do not agree."""
    for i, name in enumerate(names):
        votes = Counter(card[i] for card in cards).most_common()
        if len(votes) == 1:
            continue
        groups = [(v, [r for r, card in enumerate(cards) if card[i] == v]) for v, _ in votes]
        odd = blame({r: card[i] for r, card in enumerate(cards)})
        lines = [f"  rank {', '.join(map(str, ranks))}: {v or 'none'}" for v, ranks in groups]
        raise MismatchError("\n".join([f"check: the ranks differ in the {name}{odd}", *lines]))


def partners(rank: int, n: int) -> Iterator[int]:
    """Yield every other rank once, so that each round pairs all ranks (the circle method)."""
    even = n + n % 2
    for step in range(even - 1):
        if rank == even - 1:
            peer = step * (even // 2) % (even - 1)
        else:
            peer = (step - rank) % (even - 1)
            peer = even - 1 if peer == rank else peer
        if peer < n:
            yield peer


def _route(session: Session, peer: int) -> tuple[Session, int]:
    """Return the session that reaches a rank, and the number that the rank has there."""
    node = getattr(session, "node", None)
    if node is not None and peer in node.members:
        return node, node.members.index(peer)
    return session, peer


def _way(session: Session, peer: int) -> str:
    if peer == session.rank:
        return ""
    way, _ = _route(session, peer)
    job = getattr(way, "job", None)
    return f"messages of {job.library}" if job is not None else way.transport


def _reach(session: Session, peer: int, nonce: int, left: Callable[[], float]) -> float:
    """Exchange a few messages with a rank; return half the time of the fastest round trip."""
    way, number = _route(session, peer)
    best = np.inf
    try:
        for i in range(PINGS):
            start = time.perf_counter()
            if session.rank < peer:
                _send(way, number, nonce, i, left())
            _receive(way, number, peer, nonce, i, left)
            if session.rank > peer:
                _send(way, number, nonce, i, left())
            best = min(best, time.perf_counter() - start)
    except CollError as error:
        between = f"between rank {session.rank} and rank {peer} ({_way(session, peer)})"
        raise type(error)(f"check: messages {between} do not arrive: {error}") from None
    return best / 2


def _send(way: Session, number: int, nonce: int, i: int, timeout: float) -> None:
    ping = np.array([nonce, i, way.rank], np.int64)
    message = ping.ctypes.data, ping.nbytes, int(DType.INT64), number, TAG
    way.deliver(ping, message, timeout)


def _receive(
    way: Session, number: int, peer: int, nonce: int, i: int, left: Callable[[], float]
) -> None:
    ping: Any = np.full(3, -1, np.int64)
    while ping[0] < nonce:  # an earlier check that failed may have left some
        message = ping.ctypes.data, ping.nbytes, int(DType.INT64), number, TAG
        way.take(message, left())
    if ping.tolist() != [nonce, i, number]:
        raise TransportError(f"rank {peer} sent {ping.tolist()}, expected {[nonce, i, number]}")

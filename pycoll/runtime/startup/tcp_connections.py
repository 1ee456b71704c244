"""Connections between all ranks of several hosts: one TCP connection for each pair.

Every rank listens on a port and tells the others through a store which addresses it has. It dials
the ranks before it and is dialled by those after it. Both ends prove that they know the secret of
the job, so that strangers, and wrong hosts with the same private address, are turned away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pycoll import _C
from pycoll.config import environment
from pycoll.errors import TransportError, in_words
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.startup.tcp_handshake import Handshakes, SpareDescriptors, too_few_files
from pycoll.runtime.startup.tcp_proofs import Endpoint, Proofs, new_word

Exchange = Callable[[str, Any], list[Any]]  # gives every rank what all ranks say on a topic
Sockets = list[socket.socket | None]  # by rank; None for this one

_INTERFACES = ("PYCOLL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_OWN_FILES = 4  # of `open_api`
_MOST_SILENCE_S = 30.0


class Board(Protocol):
    """Where a rank that fails tells the others, as the stores of PyTorch; they look at it."""

    def set(self, key: str, value: str) -> object:
        """Write."""

    def check(self, keys: list[str]) -> bool:
        """Whether all have been written."""

    def get(self, key: str) -> bytes:
        """Read what has been written."""


def connect(
    exchange: Exchange,
    rank: int,
    names: Sequence[str],
    towards: str,
    timeout_s: float,
    board: Board | None = None,
    *,
    secret: str = "",
    one_host: bool = False,
) -> Sockets:
    """Connect all ranks with each other, or none; a collective.

    Args:
        exchange: Gathers values from all ranks.
        rank: This rank.
        names: What messages call each rank.
        towards: Host of the store: the way there is likely the way to the others. Or "".
        timeout_s: Longest time to wait for the others.
        board: Without it, others may notice a rank that fails only when their time is over.
        secret: What all ranks know and nobody else, or "": then whoever can read the store can pose
            as a rank.
        one_host: Whether all ranks share the network of one host; nobody else can call them then.

    Returns:
        Connected sockets, for `open_api`.

    Raises:
        TransportError: If a rank cannot be reached, may not open a file for each other rank, or has
            another secret.
    """
    proofs = Proofs(secret, rank, names)
    with contextlib.ExitStack() as held:
        own, server, spare = _prepare(len(names), towards, one_host, held)
        own = proofs.sign(own)
        places = [Endpoint.read(entry) for entry in exchange("sockets", own)]
        proofs.check(places)
        _stop_if_troubled(own, places)
        calls = Handshakes(server, places, rank, names, proofs)
        held.callback(calls.close)
        key = f"pycoll-sockets-{places[0].word}"  # of this try
        _finish(calls, timeout_s, spare, board, key, names[rank])
    return [calls.found.get(r) for r in range(len(names))]


def _finish(
    calls: Handshakes,
    timeout_s: float,
    spare: SpareDescriptors,
    board: Board | None,
    key: str,
    name: str,
) -> None:
    """Run the handshakes; if they fail, tell the others why."""

    def given_up() -> str:
        return board.get(key).decode() if board is not None and board.check([key]) else ""

    try:
        calls.run(timeout_s, spare, given_up)
    except BaseException as error:  # an interrupt, too
        try:
            with contextlib.suppress(Exception):  # the store may be what has failed
                if board is not None and not given_up():
                    board.set(key, f"{name} cannot join: {in_words(error)}")
        finally:  # not before: a rank that sees a connection end looks at the board
            for found in calls.found.values():
                found.close()
        raise


def _stop_if_troubled(own: Endpoint, places: list[Endpoint]) -> None:
    if own.trouble:
        raise TransportError(own.trouble)
    troubles = [(r, place.trouble) for r, place in enumerate(places) if place.trouble]
    if troubles:
        raise TransportError("; ".join(f"rank {r} cannot join: {why}" for r, why in troubles))


def _prepare(
    n: int, towards: str, one_host: bool, held: contextlib.ExitStack
) -> tuple[Endpoint, socket.socket | None, SpareDescriptors]:
    """Listen, and keep descriptors for n - 1 connections; what fails is for the others to hear."""
    spare = SpareDescriptors()
    held.callback(spare.fill, 0)
    try:
        spare.fill(n + _OWN_FILES)
        spare.give()  # for one after the other
        where = addresses(towards, one_host)
        server = held.enter_context(_listen(n, where))
    except TransportError as error:
        return Endpoint(0, [], "", str(error)), None, spare
    except OSError as error:
        few = error.errno in (errno.EMFILE, errno.ENFILE)
        text = too_few_files(error) if few else f"cannot listen: {error}"
        return Endpoint(0, [], "", text), None, spare
    return Endpoint(server.getsockname()[1], where, new_word()), server, spare


def open_api(
    sockets: Sockets, names: Sequence[str], timeout_s: float = _MOST_SILENCE_S
) -> _C.SocketApi:
    """Make what sends messages through connected sockets, which are its own from now on.

    A rank whose host does not answer for half of `timeout_s`, or for 30 s, is lost: a call that
    waits for it learns so before its time is over.

    Raises:
        TransportError: If the system has no means left for it.
    """
    for found in filter(None, sockets):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fds = [-1 if s is None else s.detach() for s in sockets]
    silence_s = min(timeout_s / 2, _MOST_SILENCE_S)
    try:
        api = raising(_C.SocketApi, fds, list(names), silence_s)
    except RuntimeError as error:  # of the C++ library: no thread
        raise TransportError(f"cannot serve connections: {error}") from error
    _forget_in_children(api)
    return api


def addresses(towards: str = "", one_host: bool = False) -> list[str]:
    """Return the addresses of this host that the others may use, the likeliest first.

    Raises:
        TransportError: If the interface that the environment names has none.
    """
    for variable in _INTERFACES:
        if wanted := environment().get(variable):
            found = [a for name in wanted.split(",") for a in _of_interface(name)]
            if not found:
                raise TransportError(f"{variable}={wanted}: that interface has no address")
            return found
    if one_host:
        return ["127.0.0.1"]
    found = [_way_to(towards)] if towards else []
    for _, name in socket.if_nameindex():
        found += _of_interface(name)
    useful = [a for a in dict.fromkeys(found) if a and not a.startswith("127.")]
    return [*useful, "127.0.0.1"]


def _way_to(host: str) -> str:
    """Return the address from which packets to a host leave; "" if there is none."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    return ""


def _of_interface(name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name[:15].encode())
        found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, device = line.split()
            if device == name and scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _listen(backlog: int, where: list[str]) -> socket.socket:
    """Listen where the others will call: at one address, or at several, which are all there are."""
    if len(where) == 1:
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server((where[0], 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is compiled in, but switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=backlog)


def _forget_in_children(api: _C.SocketApi) -> None:
    """Close the copies that children get by fork: they would hide that this rank has died."""
    known = weakref.ref(api)

    def forget() -> None:
        if (found := known()) is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)

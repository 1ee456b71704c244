"""Connections between all ranks of several hosts: one TCP connection for each pair.

Every rank listens on a port and tells the others through a store which addresses it has. It dials
the ranks before it and is dialled by those after it, so nobody waits in a circle. Who dials shows a
word that was drawn at random, so that strangers, and wrong hosts with the same private address, are
turned away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycoll import _C
from pycoll.config import environment
from pycoll.errors import TransportError

Exchange = Callable[[str, Any], list[Any]]  # gives every rank what all ranks say on a topic

_INTERFACES = ("PYCOLL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_HELLO = struct.Struct("!16sI")  # the word of who is dialled, the rank that dials
_DIAL_S = 3.0  # for one address
_PAUSE_S = 0.1
_WELCOME = b"\x06"


class Place(NamedTuple):
    """How a rank can be reached.

    Attributes:
        port: Port on which it listens.
        addresses: Its addresses; the likeliest first.
        word: Drawn at random, as hexadecimal digits.
    """

    port: int
    addresses: list[str]
    word: str


def connect(
    exchange: Exchange, rank: int, names: Sequence[str], towards: str, timeout_s: float
) -> _C.SocketApi:
    """Connect all ranks with each other; a collective.

    Args:
        exchange: Gathers values from all ranks.
        rank: This rank.
        names: What messages call each rank.
        towards: Host of the store: the way there is likely the way to the others. Or "".
        timeout_s: Longest time to wait for the others.

    Raises:
        TransportError: If a rank cannot be reached, with the addresses that were tried.
    """
    until = time.monotonic() + timeout_s
    sockets: list[socket.socket | None] = [None] * len(names)
    with _listen(len(names)) as server:
        own = Place(server.getsockname()[1], addresses(towards), secrets.token_hex(16))
        places = [Place(*entry) for entry in exchange("sockets", own)]
        try:
            for peer in range(rank):
                sockets[peer] = _dial(places[peer], rank, names[peer], until)
            while missing := [r for r in range(rank + 1, len(names)) if sockets[r] is None]:
                peer, found = _answer(server, bytes.fromhex(own.word), names, missing, until)
                if peer in missing:
                    sockets[peer] = found
        except BaseException:
            for found in filter(None, sockets):
                found.close()
            raise
    for found in filter(None, sockets):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    api = _C.SocketApi([-1 if s is None else s.detach() for s in sockets], list(names))
    _forget_in_children(api)
    return api


def addresses(towards: str = "") -> list[str]:
    """Return the addresses of this host that others may use, the likeliest first.

    Raises:
        TransportError: If the interface that the environment names has none.
    """
    for variable in _INTERFACES:
        if wanted := environment().get(variable):
            found = [a for name in wanted.split(",") for a in _of_interface(name)]
            if not found:
                raise TransportError(f"{variable}={wanted}: that interface has no address")
            return found
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


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is compiled in, but switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=backlog)


def _dial(place: Place, rank: int, name: str, until: float) -> socket.socket:
    hello = _HELLO.pack(bytes.fromhex(place.word), rank)
    while True:
        tried = []
        for address in place.addresses:
            try:
                found = socket.create_connection((address, place.port), timeout=_DIAL_S)
            except OSError as error:
                tried.append(f"{address}: {error}")
                continue
            try:
                found.sendall(hello)
                found.settimeout(max(_DIAL_S, until - time.monotonic()))  # it may be dialling too
                if found.recv(1) == _WELCOME:
                    return found
                tried.append(f"{address}: another process listens there")
            except OSError as error:
                tried.append(f"{address}: {error}")
            found.close()
        if time.monotonic() >= until:
            raise TransportError(
                f"rank {rank} cannot reach {name} on port {place.port}: {'; '.join(tried)}. Name "
                f"the network interface to use in {_INTERFACES[0]} on every host"
            )
        time.sleep(_PAUSE_S)


def _answer(
    server: socket.socket, word: bytes, names: Sequence[str], missing: list[int], until: float
) -> tuple[int, socket.socket | None]:
    """Take one call; return who calls, or -1 for strangers."""
    server.settimeout(max(_PAUSE_S, until - time.monotonic()))
    try:
        found, _ = server.accept()
    except TimeoutError:
        who = ", ".join(names[r] for r in missing)
        raise TransportError(f"no connection from {who} has come") from None
    with contextlib.suppress(OSError):
        found.settimeout(_DIAL_S)
        data = found.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(data) == _HELLO.size:
            said, peer = _HELLO.unpack(data)
            if secrets.compare_digest(said, word) and peer in missing:
                found.sendall(_WELCOME)
                return peer, found
    found.close()
    return -1, None


def _forget_in_children(api: _C.SocketApi) -> None:
    """Close the copies that children get by fork: they would hide that this rank has died."""
    known = weakref.ref(api)

    def forget() -> None:
        if (found := known()) is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)

"""Calls on Python objects: they become bytes, and the bytes travel in the calls on arrays."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.runtime.calls.parts.exchange import (
    broadcasts,
    exchange,
    gathers,
    in_parts,
    spread,
)
from pycoll.runtime.calls.parts.said_sizes import check_equal
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_HEAD = struct.Struct("=QQ")  # before each object: its size, and the root of the call
_SIZE = struct.Struct("=Q")  # before each object of `all_to_all`
_HEAD_BYTES, _HEADS_BYTES, _LEAST_HEAD = 512, 64 << 10, 32
"""Of the first call, which small objects need no other after; of many ranks all heads together."""


def broadcast(session: Session, x: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""
    kind = Kind.BROADCAST_OBJECT

    def prepare() -> tuple[int, float, bytes]:
        whose, limit = session.check(CallRequest(Kind.BROADCAST, root=root), timeout)
        return whose, limit, pack(x, pickle) if session.rank == whose else b""

    root, limit, data = session.refusing(prepare)
    head = spread(session, kind, root, _head(data, root, _HEAD_BYTES), limit)
    sends = session.rank == root
    call = broadcasts(session, kind, root, _HEAD_BYTES).runs
    session.fast.remember_object(kind, root, call, _HEAD_BYTES, 0, sends, not sends, _FUNCTIONS)
    (body,) = _rest(session, kind, root, data, head, timeout)
    return x if sends else unpack(body, pickle, root)


def gather(
    session: Session, kind: Kind, x: Any, root: int, pickle: bool, timeout: float | None
) -> list[Any] | None:
    """See `Communicator.gather_object` and `Communicator.all_gather_object`."""

    def prepare() -> tuple[int, float, bytes]:
        return *session.check(CallRequest(kind, root=root), timeout), pack(x, pickle)

    root, limit, data = session.refusing(prepare)
    n = session.world_size
    room = max(_LEAST_HEAD, min(_HEAD_BYTES, _HEADS_BYTES // n))
    heads = exchange(session, kind, _head(data, root, room), limit)
    reads = kind != Kind.GATHER_V or session.rank == root
    call = gathers(session, kind, room).runs
    session.fast.remember_object(kind, root, call, room, n, True, reads, _FUNCTIONS)
    bodies = _rest(session, kind, root, data, heads, timeout)
    return [unpack(body, pickle, rank) for rank, body in enumerate(bodies)] if reads else None


def _head(data: bytes, root: int, room: int) -> bytes:
    """Return the size of an object, the root of its call, and its first bytes."""
    return (_HEAD.pack(len(data), root) + data[: room - _HEAD.size]).ljust(room, b"\0")


@in_parts
def _rest(
    session: Session, kind: Kind, root: int, data: bytes, heads: bytes, timeout: float | None
) -> list[memoryview]:
    """Move what the heads have no room for; return all of each object.

    Also where the extension has moved the heads: see `_C.Fastcall.remember_object`.
    """
    if kind == Kind.BROADCAST_OBJECT:
        return [_rest_of_one(session, root, data, heads, timeout)]
    room = len(heads) // session.world_size
    starts = range(0, len(heads), room)
    sizes, roots = zip(*(_HEAD.unpack_from(heads, at) for at in starts), strict=True)
    check_equal(session, kind, "root", roots, session.limit(timeout))
    ends = [at + min(room, _HEAD.size + size) for at, size in zip(starts, sizes, strict=True)]
    view = memoryview(heads)
    bodies = [view[at + _HEAD.size : end] for at, end in zip(starts, ends, strict=True)]
    if max(sizes) > room - _HEAD.size:
        rests = [max(0, size - (room - _HEAD.size)) for size in sizes]
        row = np.frombuffer(data, np.uint8)[room - _HEAD.size :]
        whole = v_variants.gather(session, kind, row, root, None, timeout, known=rests)
        if whole is not None:
            parts = np.split(whole, np.cumsum(rests)[:-1])
            both = zip(bodies, parts, strict=True)
            bodies = [memoryview(b"".join((body, part.data))) for body, part in both]
    return bodies


def _rest_of_one(
    session: Session, root: int, data: bytes, head: bytes, timeout: float | None
) -> memoryview:
    size, _ = _HEAD.unpack_from(head)
    room = _HEAD_BYTES - _HEAD.size
    body = memoryview(head)[_HEAD.size : _HEAD.size + size]
    if size <= room:
        return body
    whole = np.frombuffer(data, np.uint8)
    if session.rank != root:
        whole = session.refusing(lambda: np.empty(size, np.uint8))
        whole[:room] = body
    rest = whole[room:]
    session.call(Kind.BROADCAST, rest, rest, "sum", root, None, None, timeout)
    return whole.data


_FUNCTIONS = pack, unpack, _rest


@in_parts
def all_to_all(session: Session, xs: Any, pickle: bool, timeout: float | None) -> list[Any]:
    """See `Communicator.all_to_all_object`."""

    def prepare() -> tuple[bytes, list[int]]:
        packed = _packed_each(xs, session, pickle, "every rank needs")
        pieces = [piece for data in packed for piece in (_SIZE.pack(len(data)), data)]
        return b"".join(pieces), [_SIZE.size + len(data) for data in packed]

    data, counts = session.refusing(prepare)
    row = np.frombuffer(data, np.uint8)
    whole = v_variants.all_to_all(session, row, counts, None, timeout, dtype_name="object")
    came, found, at = whole.data, [], 0
    for rank in range(session.world_size):
        (size,) = _SIZE.unpack_from(came, at)
        at += _SIZE.size + size
        found.append(unpack(came[at - size : at], pickle, rank))
    return found


def _packed_each(xs: Any, session: Session, pickle: bool, whose: str) -> list[bytes]:
    """Return the objects of a list, one for each rank, as bytes."""
    n = session.world_size
    if not isinstance(xs, Sequence) or isinstance(xs, (str, bytes)) or len(xs) != n:
        what = f"{len(xs)} objects" if isinstance(xs, (list, tuple)) else repr(xs)
        raise ArgumentError(f"xs is {what}; {whose} a list of {n}, one for each rank")
    return [pack(x, pickle) for x in xs]


@in_parts
def scatter(session: Session, xs: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.scatter_object`."""
    n = session.world_size
    request = CallRequest(Kind.SCATTER_V, root=root)
    root, limit = session.refusing(lambda: session.check(request, timeout))
    packed: list[bytes] = []
    if session.rank == root:
        packed = session.refusing(lambda: _packed_each(xs, session, pickle, "the root needs"))
    sizes = array("Q", [len(piece) for piece in packed] or [0] * n)
    counts = array("Q", spread(session, Kind.SCATTER_V, root, sizes.tobytes(), limit)).tolist()
    whole = np.frombuffer(b"".join(packed), np.uint8)
    mine = v_variants.scatter(session, whole, counts, root, None, timeout)
    return xs[root] if session.rank == root else unpack(mine.data, pickle, root)

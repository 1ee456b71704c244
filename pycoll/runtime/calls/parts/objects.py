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
from pycoll.runtime.calls.parts.exchange import exchange, in_parts, spread
from pycoll.runtime.calls.parts.said_sizes import check_equal
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_SIZE_AND_ROOT = struct.Struct("=QQ")  # before each object
_SIZE = struct.Struct("=Q")  # before each object of `all_to_all`
_FIRST = _SIZE_AND_ROOT.size
_HEAD_BYTES, _HEADS_BYTES, _LEAST_HEAD = 512, 64 << 10, 32
"""Of the first call, which small objects need no other after; of many ranks all heads together."""


@in_parts
def broadcast(session: Session, x: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""

    def prepare() -> tuple[int, float, bytes]:
        whose, limit = _checked(session, Kind.BROADCAST, root, timeout)
        return whose, limit, pack(x, pickle) if session.rank == whose else b""

    root, limit, data = session.refusing(prepare)
    head = spread(session, Kind.BROADCAST_OBJECT, root, _head(data, 0, _HEAD_BYTES), limit)
    size, _ = _SIZE_AND_ROOT.unpack_from(head)
    room = _HEAD_BYTES - _FIRST
    body = memoryview(head)[_FIRST : _FIRST + size]
    if size > room:
        whole = np.frombuffer(data, np.uint8)
        if session.rank != root:
            whole = session.refusing(lambda: np.empty(size, np.uint8))
            whole[:room] = body
        rest, body = whole[room:], whole.data
        session.call(Kind.BROADCAST, rest, rest, "sum", root, None, None, timeout)
    return x if session.rank == root else unpack(body, pickle, root)


@in_parts
def gather(
    session: Session, kind: Kind, x: Any, root: int, pickle: bool, timeout: float | None
) -> list[Any] | None:
    """See `Communicator.gather_object` and `Communicator.all_gather_object`."""

    def prepare() -> tuple[int, float, bytes]:
        return *_checked(session, kind, root, timeout), pack(x, pickle)

    root, limit, data = session.refusing(prepare)
    room = max(_LEAST_HEAD, min(_HEAD_BYTES, _HEADS_BYTES // session.world_size))
    heads = exchange(session, kind, _head(data, root, room), limit)
    wanted = kind != Kind.GATHER_V or session.rank == root
    sizes = _sizes_of_whole(heads, room, root)
    if sizes is not None:
        starts = range(_FIRST, len(heads), room)
        view = memoryview(heads)
        bodies = [view[at : at + size] for at, size in zip(starts, sizes, strict=True)]
    else:
        bodies = _in_two_calls(session, kind, data, heads, root, timeout)
    return [unpack(body, pickle, rank) for rank, body in enumerate(bodies)] if wanted else None


def _in_two_calls(
    session: Session, kind: Kind, data: bytes, heads: bytes, root: int, timeout: float | None
) -> list[memoryview]:
    """Gather what the heads have no room for; return all of each object."""
    room = len(heads) // session.world_size
    starts = range(0, len(heads), room)
    sizes, roots = zip(*(_SIZE_AND_ROOT.unpack_from(heads, at) for at in starts), strict=True)
    check_equal(session, kind, "root", roots, session.limit(timeout))
    ends = [at + min(room, _FIRST + size) for at, size in zip(starts, sizes, strict=True)]
    view = memoryview(heads)
    bodies = [view[at + _FIRST : end] for at, end in zip(starts, ends, strict=True)]
    if max(sizes) > room - _FIRST:
        rests = [max(0, size - (room - _FIRST)) for size in sizes]
        row = np.frombuffer(data, np.uint8)[room - _FIRST :]
        whole = v_variants.gather(session, kind, row, root, None, timeout, known=rests)
        if whole is not None:
            parts = np.split(whole, np.cumsum(rests)[:-1])
            both = zip(bodies, parts, strict=True)
            bodies = [memoryview(b"".join((body, part.data))) for body, part in both]
    return bodies


def _checked(session: Session, kind: Kind, root: Any, timeout: float | None) -> tuple[int, float]:
    """Check a root and a time limit; see `Session.check`."""
    if timeout is None and type(root) is int and 0 <= root < session.world_size:
        return root, session.config.timeout_s
    return session.check(CallRequest(kind, root=root), timeout)


def _sizes_of_whole(heads: bytes, room: int, root: int) -> list[int] | None:
    """Return the sizes of objects whose heads are all there is of them.

    None if one is larger, or if a rank has another root.
    """
    sizes = []
    for at in range(0, len(heads), room):
        size, said = _SIZE_AND_ROOT.unpack_from(heads, at)
        if said != root or size > room - _FIRST:
            return None
        sizes.append(size)
    return sizes


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


def _head(data: bytes, root: int, room: int) -> bytes:
    """Return the size of an object, the root of its call, and its first bytes."""
    return (_SIZE_AND_ROOT.pack(len(data), root) + data[: room - _FIRST]).ljust(room, b"\0")


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

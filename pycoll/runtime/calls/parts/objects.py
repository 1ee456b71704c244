"""Calls on Python objects: they become bytes, and the bytes travel in the calls on arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.runtime.calls.parts.exchange import exchange, in_parts, spread
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_SIZE_AND_ROOT = struct.Struct("=QQ")  # before each object
_FIRST = _SIZE_AND_ROOT.size
_HEAD_BYTES, _HEADS_BYTES, _LEAST_HEAD = 512, 64 << 10, 32
"""Of the first call, which small objects need no other after; of many ranks all heads together."""


@in_parts
def broadcast(session: Session, x: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""
    root, limit = session.refusing(
        lambda: session.check(CallRequest(Kind.BROADCAST, root=root), timeout)
    )
    data = session.refusing(lambda: pack(x, pickle) if session.rank == root else b"")
    head = spread(session, root, _head(data, 0, _HEAD_BYTES), limit)
    size = int(head[:8].view(np.uint64)[0])
    if size > _HEAD_BYTES - _FIRST:
        rest = np.frombuffer(data[_HEAD_BYTES - _FIRST :], np.uint8)
        if session.rank != root:
            rest = np.empty(size - (_HEAD_BYTES - _FIRST), np.uint8)
        session.call(Kind.BROADCAST, rest, rest, "sum", root, None, None, timeout)
        head = np.concatenate([head, rest])
    if session.rank == root:
        return x
    return unpack(head[_FIRST : _FIRST + size].tobytes(), pickle, f"rank {root}")


@in_parts
def gather(
    session: Session, kind: Kind, x: Any, root: int, pickle: bool, timeout: float | None
) -> list[Any] | None:
    """See `Communicator.gather_object` and `Communicator.all_gather_object`."""
    n, request = session.world_size, CallRequest(kind, root=root)
    root, limit = session.refusing(lambda: session.check(request, timeout))
    data = session.refusing(lambda: pack(x, pickle))
    room = max(_LEAST_HEAD, min(_HEAD_BYTES, _HEADS_BYTES // n))
    heads = exchange(session, kind, _head(data, root, room), limit).tobytes()
    told = [_SIZE_AND_ROOT.unpack_from(heads, first) for first in range(0, len(heads), room)]
    v_variants.check_equal(session, kind, "root", [its_root for _, its_root in told], limit)
    rests, rest = [max(0, size - (room - _FIRST)) for size, _ in told], b""
    if any(rests):
        row = np.frombuffer(data[room - _FIRST :], np.uint8)
        whole = v_variants.gather(session, kind, row, root, None, timeout, known=rests)
        rest = b"" if whole is None else whole.tobytes()
    if kind == Kind.GATHER_V and session.rank != root:
        return None
    found, begin = [], 0
    for rank, ((size, _), more) in enumerate(zip(told, rests, strict=True)):
        first = rank * room + _FIRST
        body = heads[first : first + size - more] + rest[begin : begin + more]
        begin += more
        found.append(unpack(body, pickle, f"rank {rank}"))
    return found


def _head(data: bytes, root: int, room: int) -> np.ndarray:
    """Return the size of an object, the root of its call, and its first bytes."""
    head = bytearray(room)
    end = _FIRST + min(len(data), room - _FIRST)
    head[:end] = _SIZE_AND_ROOT.pack(len(data), root) + data[: end - _FIRST]
    return np.frombuffer(head, np.uint8)


@in_parts
def scatter(session: Session, xs: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.scatter_object`."""
    n = session.world_size

    def pieces() -> list[bytes]:
        if session.rank != root:
            return []
        if not isinstance(xs, Sequence) or len(xs) != n:
            what = f"{len(xs)} objects" if isinstance(xs, Sequence) else repr(xs)
            raise ArgumentError(f"xs is {what}; the root needs a list of {n}, one for each rank")
        return [pack(x, pickle) for x in xs]

    request = CallRequest(Kind.SCATTER_V, root=root)
    root, limit = session.refusing(lambda: session.check(request, timeout))
    packed = session.refusing(pieces)
    counts = np.array([len(piece) for piece in packed] or [0] * n)
    counts = spread(session, root, counts, limit)
    whole = np.frombuffer(b"".join(packed), np.uint8)
    mine = v_variants.scatter(session, whole, counts.tolist(), root, None, timeout)
    return xs[root] if session.rank == root else unpack(mine.tobytes(), pickle, f"rank {root}")


def send(session: Session, x: Any, dst: int, tag: int, pickle: bool, timeout: float | None) -> None:
    """See `Communicator.send_object`."""
    session.send(np.frombuffer(pack(x, pickle), np.uint8), dst, tag, timeout)


def recv(session: Session, src: int, tag: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.recv_object`."""
    limit = session.limit(timeout)
    info = session.probe(src, tag, limit)
    data = np.empty(info.nbytes, np.uint8)
    session.recv(data, info.src, info.tag, limit)
    return unpack(data.tobytes(), pickle, f"rank {info.src}")

"""Calls on Python objects: they become bytes, and the bytes travel in the calls on arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.calls import v_variants
from pycoll.runtime.calls.encoding import pack, unpack
from pycoll.runtime.calls.exchange import in_parts
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_SIZE = struct.Struct("<Q")  # before each object of a gather


@in_parts
def broadcast(session: Session, x: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""
    data = _own(session, x, root, pickle)
    size = np.array([data.size])
    session.call(Kind.BROADCAST, size, size, "sum", root, None, None, timeout)
    if session.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    session.call(Kind.BROADCAST, data, data, "sum", root, None, None, timeout)
    return x if session.rank == root else unpack(data.tobytes(), pickle, f"rank {root}")


@in_parts
def gather(
    session: Session, kind: Kind, x: Any, root: int, pickle: bool, timeout: float | None
) -> list[Any] | None:
    """See `Communicator.gather_object` and `Communicator.all_gather_object`."""
    data = session.refusing(lambda: pack(x, pickle))
    row = np.frombuffer(_SIZE.pack(len(data)) + data, np.uint8)
    whole = v_variants.gather(session, kind, row, root, None, timeout)
    if whole is None:
        return None
    found, rest = [], memoryview(whole)
    for rank in range(session.world_size):
        end = _SIZE.size + _SIZE.unpack(rest[: _SIZE.size])[0]
        found.append(unpack(bytes(rest[_SIZE.size : end]), pickle, f"rank {rank}"))
        rest = rest[end:]
    return found


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

    packed = session.refusing(pieces)
    counts = np.array([len(piece) for piece in packed] or [0] * n)
    session.call(Kind.BROADCAST, counts, counts, "sum", root, None, None, timeout)
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


def _own(session: Session, x: Any, root: int, pickle: bool) -> np.ndarray:
    """Return the bytes of the root's object; nothing on other ranks."""
    data = session.refusing(lambda: pack(x, pickle) if session.rank == root else b"")
    return np.frombuffer(data, np.uint8)

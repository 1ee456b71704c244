"""Calls on Python objects: they become bytes, and the bytes travel in the calls on arrays.

First the head of each object moves, with as many of its bytes as there is room for: of small ones
that is all. If any is larger, all move once more, whole.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.runtime.calls.parts.exchange import bytes_call, in_parts, move, spread
from pycoll.runtime.calls.parts.said_sizes import check_equal
from pycoll.runtime.calls.prepared import CallRequest
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_HEAD = struct.Struct("=QQQ")
"""Before each object: its size, that of the largest one of its sender's, and the root."""
_HEAD_BYTES, _HEADS_BYTES, _LEAST_HEAD = 512, 64 << 10, 64
"""Of the first call, which small objects need no other after; of many ranks all heads together."""


def broadcast(session: Session, x: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""
    request = CallRequest(Kind.BROADCAST, root=root, within=Kind.BROADCAST_OBJECT)
    given = lambda sends: [pack(x, pickle)] if sends else []  # noqa: E731
    sends, bodies = _move(session, request, given, timeout, single=True)
    return x if sends else unpack(bodies[0], pickle, root)


def gather(
    session: Session, kind: Kind, x: Any, root: int, pickle: bool, timeout: float | None
) -> list[Any] | None:
    """See `Communicator.gather_object` and `Communicator.all_gather_object`."""
    request = CallRequest(Kind.ALL_GATHER, root=root, within=kind)
    _, bodies = _move(session, request, lambda _: [pack(x, pickle)], timeout)
    if kind == Kind.GATHER_OBJECT and session.rank != root:
        return None
    return [unpack(body, pickle, rank) for rank, body in enumerate(bodies)]


def scatter(session: Session, xs: Any, root: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.scatter_object`."""
    request = CallRequest(Kind.SCATTER, root=root, within=Kind.SCATTER_OBJECT)
    objects: list[Any] = []

    def given(sends: bool) -> list[bytes]:
        objects.extend(_each(xs, session, "the root needs") if sends else ())
        return [pack(x, pickle) for x in objects]

    sends, bodies = _move(session, request, given, timeout, listed=True, single=True)
    return objects[root] if sends else unpack(bodies[0], pickle, root)


def all_to_all(session: Session, xs: Any, pickle: bool, timeout: float | None) -> list[Any]:
    """See `Communicator.all_to_all_object`."""
    request = CallRequest(Kind.ALL_TO_ALL, within=Kind.ALL_TO_ALL_OBJECT)

    def given(_: bool) -> list[bytes]:
        return [pack(x, pickle) for x in _each(xs, session, "every rank needs")]

    _, bodies = _move(session, request, given, timeout, listed=True)
    return [unpack(body, pickle, rank) for rank, body in enumerate(bodies)]


def _each(xs: Any, session: Session, whose: str) -> list[Any]:
    """Return the objects of a list, one for each rank."""
    n = session.world_size
    listed = isinstance(xs, Sequence) and not isinstance(xs, (str, bytes))
    objects = list(xs) if listed else []  # packing one may change what the caller has
    if not listed or len(objects) != n:
        what = f"{len(objects)} objects" if isinstance(xs, (list, tuple)) else repr(xs)
        raise ArgumentError(f"xs is {what}; {whose} a list of {n}, one for each rank")
    return objects


def _move(
    session: Session,
    request: CallRequest,
    given: Callable[[bool], list[bytes]],
    timeout: float | None,
    *,
    listed: bool = False,
    single: bool = False,
) -> tuple[bool, list[memoryview]]:
    """Move objects, and let the extension serve calls like this one.

    Args:
        session: The ranks.
        request: Moves the heads.
        given: Returns what a rank gives that sends, or that does not.
        timeout: Seconds, or None.
        listed: The caller gives a list of objects, one for each rank.
        single: And gets one object, that of the root, which alone sends.

    Returns:
        Whether this rank sends, and the bytes of the objects that have come.
    """
    n, kind = session.world_size, request.within
    room = max(_LEAST_HEAD, min(_HEAD_BYTES, _HEADS_BYTES // n))

    def prepare() -> tuple[int, float, bool, list[bytes]]:
        root, limit = session.check(request, timeout)
        sends = not single or session.rank == root
        return root, limit, sends, given(sends)

    root, limit, sends, data = session.refusing(prepare)
    call = bytes_call(session, request._replace(root=root if single else 0), room)
    largest = max(map(len, data), default=0)
    heads = [_HEAD.pack(len(x), largest, root) + x[: room - _HEAD.size] for x in data]
    rows = b"".join(head.ljust(room, b"\0") for head in heads) or bytes(call.given * room)
    came = move(session, call, rows, limit)
    reads = sends != single and (kind != Kind.GATHER_OBJECT or session.rank == root)
    shape = n if listed else 0, 0 if single else n
    session.fast.remember_object(kind, root, call.runs, room, *shape, sends, reads, _FUNCTIONS)
    return sends, _rest(session, kind, root, data, came, timeout)


@in_parts
def _rest(
    session: Session,
    kind: Kind,
    root: int,
    data: list[bytes],
    came: bytes,
    timeout: float | None,
) -> list[memoryview]:
    """Move what the heads have no room for; return all of each object.

    Also where the extension has moved the heads: see `_C.Fastcall.remember_object`.
    """
    single = kind in (Kind.BROADCAST_OBJECT, Kind.SCATTER_OBJECT)
    room = len(came) // (1 if single else session.world_size)
    starts = range(0, len(came), room)
    sizes, largest, roots = zip(*(_HEAD.unpack_from(came, at) for at in starts), strict=True)
    check_equal(session, kind, "root", roots, session.limit(timeout))
    if max(largest) > room - _HEAD.size:
        return _WHOLE[kind](session, kind, root, data, sizes, timeout)
    view = memoryview(came)
    firsts = (at + _HEAD.size for at in starts)
    return [view[first : first + size] for first, size in zip(firsts, sizes, strict=True)]


def _broadcast_whole(
    session: Session, _: Kind, root: int, data: list[bytes], sizes: Sequence[int], timeout: Any
) -> list[memoryview]:
    if data:
        whole = np.frombuffer(data[0], np.uint8)
    else:
        whole = session.refusing(lambda: np.empty(sizes[0], np.uint8))
    session.call(Kind.BROADCAST, whole, whole, "sum", root, None, None, timeout)
    return [whole.data]


def _gather_whole(
    session: Session, kind: Kind, root: int, data: list[bytes], sizes: Sequence[int], timeout: Any
) -> list[memoryview]:
    row, to_all = np.frombuffer(data[0], np.uint8), kind == Kind.ALL_GATHER_OBJECT
    by_size = Kind.ALL_GATHER_V if to_all else Kind.GATHER_V
    whole = v_variants.gather(session, by_size, row, root, None, timeout, known=list(sizes))
    return [] if whole is None else _cut(whole, sizes)


def _scatter_whole(
    session: Session, kind: Kind, root: int, data: list[bytes], _: Sequence[int], timeout: Any
) -> list[memoryview]:
    sizes = array("Q", map(len, data) if data else [0] * session.world_size)
    limit = session.limit(timeout)
    counts = array("Q", spread(session, kind, root, sizes.tobytes(), limit)).tolist()
    whole = session.refusing(lambda: _joined(data))
    return [v_variants.scatter(session, whole, counts, root, None, timeout).data]


def _all_to_all_whole(
    session: Session, _: Kind, __: int, data: list[bytes], sizes: Sequence[int], timeout: Any
) -> list[memoryview]:
    row, counts = session.refusing(lambda: _joined(data)), list(map(len, data))
    whole = v_variants.all_to_all(session, row, counts, None, timeout, dtype_name="object")
    return _cut(whole, sizes)


def _joined(data: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(data), np.uint8)


def _cut(whole: np.ndarray, sizes: Sequence[int]) -> list[memoryview]:
    """Return pieces of so many bytes each."""
    ends = itertools.accumulate(sizes)
    return [whole.data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


_WHOLE = {
    Kind.BROADCAST_OBJECT: _broadcast_whole,
    Kind.ALL_GATHER_OBJECT: _gather_whole,
    Kind.GATHER_OBJECT: _gather_whole,
    Kind.SCATTER_OBJECT: _scatter_whole,
    Kind.ALL_TO_ALL_OBJECT: _all_to_all_whole,
}
_FUNCTIONS = pack, unpack, _rest

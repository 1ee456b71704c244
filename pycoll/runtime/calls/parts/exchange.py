"""Calls of several parts: the few bytes that ranks exchange on behalf of one, and interrupts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_F = TypeVar("_F", bound=Callable)
_TEXT_BYTES = 512


def in_parts(function: _F) -> _F:
    """Make a function run a call of several parts on a session, its first argument.

    An interrupt between two parts ends the communicator as well.
    """

    @functools.wraps(function)
    def call(session: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(session, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            session.interrupted(error)
            raise

    return call


class BytesCall(NamedTuple):
    """A call that moves bytes; all ranks give as many."""

    request: CallRequest
    nbytes: int  # of the result
    runs: Any  # see `_C.Fastcall.on_bytes`


def gathers(session: Session, kind: Kind, nbytes: int) -> BytesCall:
    """Return the call that all-gathers so many bytes of each rank, as a part of one of `kind`."""
    key = kind, nbytes
    found = session.kept.get(key)
    if found is None:
        request = CallRequest(Kind.ALL_GATHER, within=kind)
        found = _bytes_call(session, request, nbytes, session.world_size)
        session.kept[key] = found
    return found


def exchange(session: Session, kind: Kind, row: bytes, limit: float | None = None) -> bytes:
    """All-gather a few bytes as a part of a call of another kind, in whose name it is checked.

    Args:
        session: The ranks.
        kind: Of the call.
        row: This rank's bytes; all ranks give as many.
        limit: Seconds; by default those of the communicator.

    Returns:
        The bytes of all ranks.
    """
    return _run(session, gathers(session, kind, len(row)), row, limit)


def broadcasts(session: Session, kind: Kind, root: int, nbytes: int) -> BytesCall:
    """Return the call that broadcasts so many bytes, as a part of one of `kind`."""
    key = kind, root, nbytes
    found = session.kept.get(key)
    if found is None:
        request = CallRequest(Kind.BROADCAST, root=root, within=kind)
        found = _bytes_call(session, request, nbytes, 1)
        session.kept[key] = found
    return found


def spread(session: Session, kind: Kind, root: int, row: bytes, limit: float) -> bytes:
    """Return the root's bytes on every rank: a broadcast that is a part of a call of `kind`."""
    return _run(session, broadcasts(session, kind, root, len(row)), row, limit)


def _run(session: Session, call: BytesCall, row: bytes, limit: float | None) -> bytes:
    limit = session.config.timeout_s if limit is None else limit
    site = session.site()
    found = session.fast.on_bytes(call.runs, row, call.nbytes, site, limit)
    if found is not NotImplemented:
        return found
    out = _memory(call.nbytes)  # calls in the background come first
    prepared = session.refusing(lambda: _prepare(session, call.request, row, out))
    session.start(prepared, limit, False)
    return out.tobytes()


def _bytes_call(session: Session, request: CallRequest, nbytes: int, rows: int) -> BytesCall:
    def prepare() -> Any:
        out = _memory(rows * nbytes)
        return session.remembered(_prepare(session, request, bytes(nbytes), out))

    return BytesCall(request, rows * nbytes, session.refusing(prepare))


def _prepare(session: Session, request: CallRequest, row: bytes, out: np.ndarray) -> Prepared:
    given = np.frombuffer(row, np.uint8).reshape(1, -1)
    return session.prepare(request, given, out.reshape(-1, len(row)))


def _memory(nbytes: int) -> np.ndarray:
    """Return memory that is not NumPy's, which may be symmetric."""
    return np.frombuffer(bytearray(nbytes), np.uint8)


def exchange_texts(session: Session, kind: Kind, text: str, limit: float) -> list[str]:
    """Let all ranks know a short text of each, as a part of another call; see `exchange`."""
    row = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    table = exchange(session, kind, row, limit)
    texts = [table[first : first + _TEXT_BYTES] for first in range(0, len(table), _TEXT_BYTES)]
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

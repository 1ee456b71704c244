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
    """A call that moves rows of bytes; all ranks give as many."""

    request: CallRequest
    given: int  # rows of this rank's
    came: int  # rows of the result
    row: int  # bytes
    runs: Any  # see `_C.Fastcall.on_bytes`


def bytes_call(session: Session, request: CallRequest, row: int) -> BytesCall:
    """Return the call that moves rows of so many bytes, as a part of one of `request.within`."""
    key = request.kind, request.within, request.root, row
    found = session.kept.get(key)
    if found is None:
        n = session.world_size
        given = n if request.kind in (Kind.SCATTER, Kind.ALL_TO_ALL) else 1
        came = n if request.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else 1
        call = BytesCall(request, given, came, row, None)

        def prepare() -> Any:
            return session.remembered(_prepare(session, call, bytes(given * row)))

        found = session.kept[key] = call._replace(runs=session.refusing(prepare))
    return found


def gathers(session: Session, kind: Kind, nbytes: int) -> BytesCall:
    """Return the call that all-gathers so many bytes of each rank, as a part of one of `kind`."""
    return bytes_call(session, CallRequest(Kind.ALL_GATHER, within=kind), nbytes)


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
    return move(session, gathers(session, kind, len(row)), row, limit)


def spread(session: Session, kind: Kind, root: int, row: bytes, limit: float) -> bytes:
    """Return the root's bytes on every rank: a broadcast that is a part of a call of `kind`."""
    request = CallRequest(Kind.BROADCAST, root=root, within=kind)
    return move(session, bytes_call(session, request, len(row)), row, limit)


def move(session: Session, call: BytesCall, data: bytes, limit: float | None = None) -> bytes:
    """Make a call on bytes; return what it gives."""
    limit = session.config.timeout_s if limit is None else limit
    site = session.site()
    found = session.fast.on_bytes(call.runs, data, call.came * call.row, site, limit)
    if found is not NotImplemented:
        return found
    prepared = session.refusing(lambda: _prepare(session, call, data))
    session.start(prepared, limit, False)  # calls in the background come first
    return prepared.result.tobytes()


def _prepare(session: Session, call: BytesCall, data: bytes) -> Prepared:
    """Prepare a call on memory that is not NumPy's, which may be symmetric."""
    given = np.frombuffer(data, np.uint8).reshape(call.given, call.row)
    out = np.frombuffer(bytearray(call.came * call.row), np.uint8).reshape(call.came, call.row)
    return session.prepare(call.request, given, out)


def exchange_texts(session: Session, kind: Kind, text: str, limit: float) -> list[str]:
    """Let all ranks know a short text of each, as a part of another call; see `exchange`."""
    row = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    table = exchange(session, kind, row, limit)
    texts = [table[first : first + _TEXT_BYTES] for first in range(0, len(table), _TEXT_BYTES)]
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

"""Calls of several parts: the few numbers that ranks exchange on behalf of one, and interrupts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

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


def exchange(
    session: Session, kind: Kind, row: np.ndarray, limit: float | None = None
) -> np.ndarray:
    """All-gather a row of numbers as a part of a call of another kind, in whose name it is checked.

    Returns:
        The numbers of all ranks, ``[world_size, ...]``.
    """
    key = kind, row.dtype.char, row.size
    # Taken out while it is used: a second thread, which will be refused, must not write there.
    kept = session.kept.pop(key, None)
    own, table, prepared = kept or session.refusing(lambda: _prepare(session, kind, row))
    own[0] = row
    session.start(prepared, session.config.timeout_s if limit is None else limit, False)
    session.kept[key] = own, table, prepared
    return table.copy()


def _prepare(session: Session, kind: Kind, row: np.ndarray) -> tuple[Any, Any, Prepared]:
    """Return memory for a row and for those of all ranks, and the call that fills it."""
    own, table = (_rows(rows, row) for rows in (1, session.world_size))
    request = CallRequest(Kind.ALL_GATHER, within=kind)
    return own, table, _again(session, session.prepare(request, own, table))


def spread(session: Session, root: int, row: np.ndarray, limit: float) -> np.ndarray:
    """Return the root's row of numbers on every rank: a broadcast that is a part of a call."""
    key = Kind.BROADCAST, root, row.dtype.char, row.size
    kept = session.kept.pop(key, None)  # see `exchange`
    own, prepared = kept or session.refusing(lambda: _prepare_spread(session, root, row))
    if session.rank == root:
        own[0] = row
    session.start(prepared, limit, False)
    session.kept[key] = own, prepared
    return own[0].copy()


def _prepare_spread(session: Session, root: int, row: np.ndarray) -> tuple[Any, Prepared]:
    own = _rows(1, row)
    return own, _again(session, session.prepare(CallRequest(Kind.BROADCAST, root=root), own, own))


def _again(session: Session, prepared: Prepared) -> Prepared:
    prepared.address_call = session.address_call(prepared.binding)
    return prepared


def _rows(count: int, row: np.ndarray) -> np.ndarray:
    """Return memory for rows; none of NumPy's, which may be symmetric, and is not given back."""
    return np.frombuffer(bytearray(count * row.nbytes), row.dtype).reshape(count, row.size)


def exchange_texts(session: Session, kind: Kind, text: str, limit: float) -> list[str]:
    """Let all ranks know a short text of each, as a part of another call; see `exchange`."""
    row = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
    table = exchange(session, kind, row, limit)
    return [bytes(r).rstrip(b"\0").decode(errors="replace") for r in table]

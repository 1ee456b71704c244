"""What ranks tell each other on behalf of a call: a few numbers each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pycoll.runtime.prepared import Request
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.runtime.session import Session

_TEXT_BYTES = 512


def exchange(
    session: Session, kind: Kind, row: np.ndarray, limit: float | None = None
) -> np.ndarray:
    """All-gather a row of numbers as a part of another call, in whose name it is checked.

    Args:
        session: The communicator.
        kind: The call; ranks that make another one, be it an all-gather, get a `MismatchError`.
        row: The numbers of this rank, as many on every rank.
        limit: Seconds, or None for those of the communicator.

    Returns:
        The numbers of all ranks, ``[world_size, ...]``.
    """
    request = Request(Kind.ALL_GATHER, within=kind)
    prepared = session.refusing(lambda: session.prepare(request, row[None], None))
    return session.start(prepared, session.config.timeout_s if limit is None else limit, False)


def exchange_texts(session: Session, kind: Kind, text: str, limit: float) -> list[str]:
    """Let all ranks know a short text of each, as a part of another call; see `exchange`."""
    row = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
    table = exchange(session, kind, row, limit)
    return [bytes(r).rstrip(b"\0").decode(errors="replace") for r in table]

"""What ranks tell each other before a v-variant: types and sizes of their rows, compared."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from pycoll.errors import MismatchError
from pycoll.runtime.calls.parts.exchange import exchange_texts
from pycoll.runtime.sessions.reports import blame
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind, type_name


def row_of(code: int, width: int, values: Sequence[int]) -> bytes:
    """Return what a rank says: type and elements of its rows, and how many there are."""
    return array("Q", [code, width, *values]).tobytes()


def sizes_in(session: Session, kind: Kind, said: bytes, limit: float) -> np.ndarray:
    """Check what ranks said of their rows; return the sizes, ``[world_size, values]``."""
    table = np.frombuffer(said, np.uint64).reshape(session.world_size, -1)
    codes, widths = table[:, 0].tolist(), table[:, 1].tolist()
    if len(set(codes)) > 1:
        _differ(session, kind, "dtype", [type_name(code) for code in codes], limit)
    if len(set(widths)) > 1:
        _differ(session, kind, "row", [f"rows of {w} elements" for w in widths], limit)
    return table[:, 2:]


def check_counts_equal(
    session: Session, kind: Kind, said: bytes, counts: np.ndarray, limit: float
) -> None:
    """Check that all ranks were given the same counts."""
    table = sizes_in(session, kind, said, limit)
    if (table != counts).any():
        _differ(session, kind, "counts", [f"counts={row}" for row in table.tolist()], limit)


def check_equal(
    session: Session, kind: Kind, field: str, said: Sequence[Any], limit: float
) -> None:
    """Raise MismatchError on every rank if they have said different things of a field."""
    if said.count(said[0]) < len(said):
        _differ(session, kind, field, [f"{field}={value}" for value in said], limit)


def _differ(
    session: Session, kind: Kind, field: str, said: Sequence[str], limit: float
) -> NoReturn:
    """Raise what ranks raise that have seen a difference, which all of them have."""
    sites = exchange_texts(session, kind, session.here(), limit)
    odd = blame(dict(enumerate(said)))
    lines = [f"ranks called different things; field '{field}' differs{odd}"]
    for rank, (what, site) in enumerate(zip(said, sites, strict=True)):
        lines.append(f"  rank {rank}: {kind.name.lower()}({what}) at {site}")
    raise MismatchError("\n".join([*lines, "Nothing was moved; the communicator stays usable."]))

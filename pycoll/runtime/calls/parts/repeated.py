"""V-variants like earlier ones: only their sizes are exchanged, and compared with those of then."""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll.runtime.calls.parts.exchange import gathers
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_MOST_BYTES = 64 << 10  # of what all ranks say of their sizes
_TOLD = {Kind.ALL_GATHER_V: 1, Kind.GATHER_V: 1, Kind.ALL_TO_ALL_V: 2}
"""What ranks tell each other, see `_C.Fastcall.remember_sized`; 0 for all other kinds."""


class Sized(NamedTuple):
    """A call of a v-variant as the user made it, in the order of `_C.Fastcall.run_sized`."""

    kind: Kind
    x: Any
    out: Any
    op: str
    root: int
    order: str | None
    counts: Any

    @property
    def request(self) -> CallRequest:
        """What was asked for, apart from the arrays."""
        return CallRequest(self.kind, self.op, self.root, self.order)


class Told(NamedTuple):
    """What ranks have told each other before such a call."""

    row: bytes  # this rank's
    table: bytes  # of all
    places: tuple[int, int]  # addresses of this rank's arrays; 0 where there is none


def again(
    session: Session, call: Sized, timeout: float | None, counted: bool = False
) -> tuple[bool, Any]:
    """Make a call that is like an earlier one.

    Returns:
        True and its result, with ``counted`` also the rows that came from each rank; or False and
        what ranks said of their sizes, which are other ones now, or False and None for the first
        call of its kind.
    """
    if timeout is None:
        limit = session.config.timeout_s
    else:
        limit = session.refusing(lambda: session.limit(timeout))
    site = session.site()
    found = session.fast.run_sized(*call, site, limit, counted)
    if found is NotImplemented:
        return False, None
    return (False, found) if type(found) is bytes else (True, found)


def remember(session: Session, call: Sized, told: Told, made: Prepared) -> None:
    """Let calls like this one, which has succeeded, go without Python code."""
    if (made.in_ptr, made.out_ptr) == told.places and len(told.table) <= _MOST_BYTES:
        tell = gathers(session, call.kind, len(told.row)).runs
        move = session.remembered(made)
        kind = _TOLD.get(call.kind, 0)
        said = told.row, told.table
        session.fast.remember_sized(*call, tell, *said, move, made.result, kind, session.rank)

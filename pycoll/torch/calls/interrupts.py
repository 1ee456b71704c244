"""Interrupts of calls: the peers would take a later call of this rank for its part of one."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pycoll.runtime.sessions.session import Session

_F = TypeVar("_F", bound=Callable)


def tell_interrupt(owner: weakref.ref[Session], error: BaseException) -> None:
    """End a group because of an interrupt, if there still is one; errors of calls do not count.

    Args:
        owner: The session of the group.
        error: What a call has raised.
    """
    if isinstance(error, Exception):
        return
    session = owner()
    with contextlib.suppress(Exception):  # they know of it, if it came inside the engine
        if session is not None:
            session.abort(f"rank {session.rank} was interrupted ({type(error).__name__})")


def ends_group(operation: _F) -> _F:
    """Make an operation of a process group end the group if it is interrupted, wherever that is.

    Those that are made again and again, see `fast_path`, have a ``try`` of their own, which
    costs nothing; this costs 0.2 us of their 5.
    """

    @functools.wraps(operation)
    def whole(group: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return operation(group, *args, **kwargs)
        except BaseException as error:
            group._ended_by(error)
            raise

    return whole

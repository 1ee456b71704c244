"""The end of a communicator, or of its process, while something still uses it."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any, NoReturn, Protocol

from pycoll.errors import CommClosed, ConcurrentUseError

_PATIENCE_S = 1.0
_POLL_S = 0.001


class Leaver(Protocol):
    """What can leave a job."""

    def leave(self, reason: BaseException | str) -> None:
        """Tell the peers why this rank leaves."""

    def close(self) -> None:
        """Leave the communicator."""


def leave_at_exit(reference: weakref.ref[Leaver]) -> None:
    """Close a session when the interpreter ends, and tell the peers of the exception that ends it.

    After an orderly end only the peers that still wait for this rank hear of it. A call in which a
    daemon thread waits is made to raise: the thread could not return to a dying interpreter.
    """
    session = reference()
    if session is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        session.leave(error)
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        try:
            session.close()
            return
        except ConcurrentUseError:
            session.leave("it exited while one of its threads was in a call")
            time.sleep(_POLL_S)


class Hook(weakref.WeakMethod):
    """A weak reference to a method that, once its object is gone, gives one that says so.

    Python clears weak references to garbage before it calls the ``__del__`` of what lies in it.
    """

    def __call__(self) -> Any:
        """Return what to call."""
        return super().__call__() or _gone


def _gone(*_: object) -> NoReturn:
    raise CommClosed("this communicator is being freed, and cannot be used any more")

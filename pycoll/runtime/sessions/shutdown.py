"""The end of a communicator, or of its process, while something still uses it."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, Protocol

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollError, CommClosed, ConcurrentUseError

_PATIENCE_S = 1.0
_SENDS_S = 10.0  # for messages of isend that are still to be received
_POLL_S = 0.001
_MODULE = "pycoll.left_open"  # exists from the first session on that outlives its exit handler
_ENDING = (
    "this communicator was closed, because the interpreter is ending: {}; communicate before the "
    "program ends, and close the communicator there"
)


class Leaver(Protocol):
    """What can leave a job."""

    for_users: bool
    rank: int
    config: Config
    finish_sends: Callable[[float], CollError | None]
    device: Any
    closed_because: str
    leave: Callable[[BaseException | str], None]
    close: Callable[[], None]
    prepare_for_exit: Callable[[], None]


def leave_at_exit(reference: weakref.ref[Leaver]) -> None:
    """Close a session when the interpreter ends, and tell the peers of the exception that ends it.

    After an orderly end, a user's communicator stays open for exit handlers and finalizers that are
    still to come; see `Closer`. A call in which a daemon thread waits is made to raise: the thread
    could not return to a dying interpreter.
    """
    session = reference()
    if session is None:
        return
    error = getattr(sys, "last_value", None)
    if error is None and session.for_users:
        _finish_sends(session)
    if error is None and session.for_users and session.device is None:
        with contextlib.suppress(CollError):  # `close` will raise it, too
            session.prepare_for_exit()
            return _leave_open(session)
    why = "a thread was in a call" if error is None else f"{type(error).__name__} has ended it"
    session.closed_because = _ENDING.format("it used a device" if session.device else why)
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


def _finish_sends(session: Leaver) -> None:
    """Say so if a message is lost: the program ends without having waited for it."""
    lost: CollError | None
    try:
        lost = session.finish_sends(min(_SENDS_S, session.config.timeout_s))
    except ConcurrentUseError as error:
        lost = error
    if lost is not None:
        sys.stderr.write(f"pycoll: rank {session.rank} ended without wait(): {lost}\n")


class Closer:
    """Closes sessions after the program's own exit handlers and finalizers have run.

    The interpreter first drops what only the program refers to, and then clears the modules that
    are left, the youngest one first. That is the one made here: nothing of pycoll is gone yet.
    """

    def __init__(self) -> None:
        self.sessions: list[Leaver] = []

    def close(self) -> None:
        """Close them, the latest first."""
        while self.sessions:
            session = self.sessions.pop()
            session.closed_because = _ENDING.format("its exit handlers have run")
            with contextlib.suppress(CollError):  # as in a child made by fork
                session.close()

    __del__ = close


def _leave_open(session: Leaver) -> None:
    module = sys.modules.get(_MODULE)
    if module is None:
        module = sys.modules[_MODULE] = ModuleType(_MODULE)
        module.closer = Closer()
        _C.never_free(module)  # else it would not be among the modules that are left
    module.closer.sessions.append(session)


def close_left_open() -> None:
    """Close what would be closed at the end of the interpreter, in a process that has none."""
    module = sys.modules.pop(_MODULE, None)
    if module is not None:
        module.closer.close()


def freed() -> NoReturn:
    """Raise what a call raises whose session is being freed.

    Python clears weak references to garbage before it calls the ``__del__`` of what lies in it.
    """
    raise CommClosed("this communicator is being freed, and cannot be used any more")

"""A communicator of the ranks that are left and of those that have come: `Communicator.grow`."""

from __future__ import annotations

from functools import partial

from pycoll.errors import ArgumentError, CollTimeout
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.one_host import take_place


def grow(parent: Session, timeout: float | None) -> Session:
    """Make a session with newcomers; see `pycoll.Communicator.grow`.

    Who belongs to it is decided by the launcher, which sees every process end. The new session has
    memory of its own, so nothing that is left of the old one can write into it.
    """
    if parent.link is None:
        raise ArgumentError(
            "ranks can be added to the communicator of a whole job that was started by `pycoll run "
            "--elastic`, and to what its grow and shrink return"
        )
    limit, engine = parent._limit(timeout), parent.engine
    held = parent.guard(engine.hold)
    try:
        parent.give_way("grow")
        return parent.link.meet(partial(take_place, config=parent.config), limit)
    except CollTimeout:
        raise
    except BaseException as error:
        parent.leave(error)
        raise
    finally:
        del held

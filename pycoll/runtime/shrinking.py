"""A communicator of the ranks that are left when others are gone: `Communicator.shrink`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pycoll import _C
from pycoll.errors import ArgumentError, CollTimeout, TransportError
from pycoll.runtime.bootstrap import adopt, make_memfd
from pycoll.runtime.calls import check_timeout
from pycoll.runtime.groups import member
from pycoll.runtime.reports import raising
from pycoll.runtime.session import Session

_SOON_S = 1.0  # by when a process whose files are closed is over


def shrink(parent: Session, timeout: float | None, kind: type[Session] = Session) -> Session:
    """Make a session of the ranks that are left; see `pycoll.Communicator.shrink`.

    Who they are is counted in the control memory (``csrc/survivors.h``), which works whatever has
    become of the communicator. The lowest of them makes the memory of the new one. A rank that
    fails on the way leaves, so that the others go on without it.
    """
    engine = parent.engine
    if not parent.can_shrink:
        raise ArgumentError(
            "shrink is for ranks that share the memory of one host; over MPI start the job again"
        )
    limit = parent.config.timeout_s if timeout is None else check_timeout(timeout)
    end = time.monotonic() + limit

    def left() -> float:
        return max(0.0, end - time.monotonic())

    child, fd = None, -1
    try:
        parent.abort(f"rank {parent.rank} called shrink")  # who is in another call hears of it
        parent.guard(engine.settle)
        votes = _C.Survivors(parent.control, parent.rank, parent.threads)
        while child is None:
            fd = make_memfd("control")
            group = raising(votes.agree, fd, left())
            if not group:
                break
            child = _join(parent, votes, group, kind, left)
            os.close(fd)
            fd = -1
    except BaseException as error:
        parent.leave(error)
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    if child is None:
        raise CollTimeout(_awaited(parent, votes))
    if parent.tuning is not None:
        child.use(parent.tuning)
    return child


def _join(
    parent: Session,
    votes: _C.Survivors,
    group: list[int],
    kind: type[Session],
    left: Callable[[], float],
) -> Session | None:
    """Join the ranks that are left; None if one of them is gone before all have joined."""
    try:
        fd = adopt(*votes.offered(group[0]))
    except TransportError:
        if votes.await_gone(group[0], _SOON_S):
            return None
        raise
    try:
        child = member(parent, fd, group, kind)
    finally:
        os.close(fd)
    try:
        if raising(votes.join, left()):
            return child
    except BaseException as error:
        child.leave(error)
        child.close()
        raise
    child.close()
    return None


def _awaited(parent: Session, votes: _C.Survivors) -> str:
    """Say who was waited for."""
    names = parent.members or range(parent.world_size)
    late = [f"rank {names[r]} (process {votes.offered(r)[0]})" for r in votes.missing()]
    return (
        f"shrink: {', '.join(late) or 'no rank any more'} has neither called it nor ended in time; "
        "end what is stuck, and call shrink again"
    )

"""A communicator of the ranks that are left when others are gone: `Communicator.shrink`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from pycoll import _C
from pycoll.errors import ArgumentError, CollError, CollTimeout, TransportError
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.bootstrap import adopt, make_memfd
from pycoll.runtime.startup.make_groups import member

_SOON_S = 1.0  # by when all ranks know that one has closed its files
_PATIENCE_S = 0.2  # for ranks that may wait in a communicator that was split from this one
_KEPT = ("shrink",)


def shrink(parent: Session, timeout: float | None) -> Session:
    """Make a session of the ranks that are left; see `pycoll.Communicator.shrink`.

    Who they are is counted in the control memory (``csrc/engine/survivors.h``), whatever has
    become of the communicator. The lowest of them makes the memory of the new one. A rank that runs
    out of time goes on from there when it is asked again; one that fails in any other way leaves,
    so that the others go on without it.
    """
    engine = parent.engine
    if not parent.can_shrink:
        raise ArgumentError(
            "shrink is for ranks that share the memory of one host; over MPI start the job again"
        )
    end = time.monotonic() + parent._limit(timeout)
    held = parent.guard(engine.hold)
    try:
        parent.give_way("shrink")
        progress = parent.kept.setdefault(_KEPT, Shrinking(parent))
        child = progress.advance(parent, lambda: max(0.0, end - time.monotonic()))
        sharing, gone = parent.sharing, parent.world_size - child.world_size
        if sharing is not None:
            sharing = sharing._replace(ranks=sharing.ranks - gone)
        child.use(parent.tuning, sharing)
        child.epoch = parent.epoch
        child.follows = parent.members is None or parent.follows
        if parent.link is not None:
            parent.link.held_by(child)
        progress.close()
        del parent.kept[_KEPT]
        return child
    except CollTimeout:
        raise
    except BaseException as error:
        parent.leave(error)
        if _KEPT in parent.kept:
            parent.kept.pop(_KEPT).give_up(error)
        raise
    finally:
        del held


def abort_children(parent: Session, ranks: set[int], reason: str) -> None:
    """Abort what was split from a session and has one of these ranks of the job."""
    for child in tuple(parent.children.values()):
        if ranks & set(child.members or ()):
            with contextlib.suppress(CollError):  # it is closed already
                child.abort(reason)
            abort_children(child, ranks, reason)


class Shrinking:
    """The progress of one rank in `shrink`."""

    def __init__(self, parent: Session) -> None:
        """Begin."""
        self._votes = _C.Survivors(parent.control, parent.rank, parent.threads)
        self._offers: list[int] = []  # of all rounds: another rank may be about to open any of them
        self._fresh = False  # the last of them has not been in a round that was decided
        self._group: list[int] = []  # the survivors, once that is decided
        self._child: Session | None = None

    def __del__(self) -> None:
        """Close the offers of a rank that was dropped."""
        self.close()

    def advance(self, parent: Session, left: Callable[[], float]) -> Session:
        """Go on to the end, or until no time is left.

        Raises:
            CollTimeout: This can be called again.
        """
        while True:
            if not self._group:
                if not self._fresh:
                    self._offers.append(make_memfd("control"))
                self._group = raising(self._votes.agree, self._offers[-1], min(_PATIENCE_S, left()))
                if not self._group:
                    self._call_from_children(parent)
                    self._group = raising(self._votes.agree, self._offers[-1], left())
                self._fresh = not self._group
                if self._fresh:
                    raise CollTimeout(self._late(parent, "called it"))
            if self._child is None:
                self._child = self._join(parent, left)
            if self._child is not None:
                ended = raising(self._votes.join, left())
                if ended == _C.Round.LATE:
                    raise CollTimeout(self._late(parent, "joined those who are left"))
                if ended == _C.Round.JOINED:
                    return self._child
                self._child.close()
            self._child, self._group = None, []

    def _call_from_children(self, parent: Session) -> None:
        """Let ranks that have not come know: they may wait for this one in a part of the parent."""
        names = parent.members or range(parent.world_size)
        abort_children(
            parent,
            {names[rank] for rank in self._votes.missing()},
            f"rank {parent.rank} of the communicator that this was split from called shrink there",
        )

    def _join(self, parent: Session, left: Callable[[], float]) -> Session | None:
        """Make a session out of what the lowest rank offers; None if it offers that no more."""
        leader = self._group[0]
        try:
            fd = adopt(*self._votes.offered(leader))
        except TransportError as error:
            if self._votes.await_other_offer(leader, min(_SOON_S, left())):
                return None
            if left() > 0:
                raise
            raise CollTimeout(f"{error}; call shrink again") from None
        try:
            if not self._votes.offers(leader):
                return None  # the descriptor may have been another one's by then
            return member(parent, fd, self._group, Session, left())
        except CollTimeout as error:
            raise CollTimeout(f"{error}; end what is stuck, and call shrink again") from None
        finally:
            os.close(fd)

    def _late(self, parent: Session, what: str) -> str:
        """Say who was waited for, and what to do."""
        late, names = self._votes.missing(), parent.members or range(parent.world_size)
        named = [
            f"rank {names[r]}" + f" (process {self._votes.offered(r)[0]})" * (not parent.threads)
            for r in late
        ]
        who = f"{', '.join(named)} {'have' if len(late) > 1 else 'has'}" if late else "one rank has"
        return (
            f"shrink: {who} neither {what} nor ended in time; "
            "end what is stuck, and call shrink again"
        )

    def close(self) -> None:
        """Close the memory that this rank has offered."""
        while self._offers:
            os.close(self._offers.pop())

    def give_up(self, error: BaseException) -> None:
        """Leave what has been made; this rank has left the communicator of all already."""
        if self._child is not None:
            self._child.leave(error)
            self._child.close()
        self.close()

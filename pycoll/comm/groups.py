"""Communicators made out of one: the part of a communicator that is about groups of ranks."""

from __future__ import annotations

from typing import TypeVar

from pycoll.runtime.calls.methods import told
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.shrink import shrink
from pycoll.runtime.startup.make_groups import split

_Comm = TypeVar("_Comm", bound="Groups")


class Groups:
    """The methods of `pycoll.Communicator` that make another one."""

    _session: Session

    @told
    def split(self: _Comm, color: int | None, key: int = 0) -> _Comm | None:
        """Make communicators of the ranks with equal colours; a collective.

        Args:
            color: Group to join, or None to join none.
            key: Ranks of a group are ordered by (key, rank).

        Returns:
            The new communicator, or None for ``color=None``.
        """
        session = split(self._session, color, key)
        return None if session is None else type(self)(session)

    @told
    def dup(self: _Comm) -> _Comm:
        """Make a communicator of the same ranks with traffic of its own; a collective."""
        return self.split(0)

    def shrink(self: _Comm, *, timeout: float | None = None) -> _Comm:
        """Make a communicator of the ranks that are left, after a failure.

        Every rank that goes on calls it, having caught the error that the others got, too. Ranks
        are gone when their process has died, or when they have closed the communicator or left it
        by an exception. A rank that lives is never left out: it is waited for, even if it has
        become another program. This communicator raises from then on, if it did not before, and so
        do all that were split from it; they are still to be closed. Arrays in symmetric memory stay
        what they are, and the memory of those who are gone stays taken until the job ends.

        A call may have succeeded on some ranks and failed on others, so agree on where to go on,
        as in ``examples/survive.py``. An exception other than `CollTimeout`, as by Ctrl-C, makes
        this rank one of those who have left.

        Args:
            timeout: Seconds to wait for ranks that have neither come nor gone; by default the
                communicator's.

        Returns:
            The new communicator, in which ranks have the order that they had in this one.

        Raises:
            CollTimeout: If a rank has neither come nor gone in time. Call `shrink` again to go on
                waiting; the others may be in the new communicator already. A rank that closes this
                one instead is gone.
            ArgumentError: For a limit that is not above 0, and for ranks that reach each other over
                MPI. The rank may call it again.
            CommClosed: If this rank has closed or left the communicator.
            ConcurrentUseError: While another thread is inside a call.

        Source: Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI
        communication capability: design and rationale", IJHPCA 27(3), 2013 (revoke, shrink).
        """
        return type(self)(shrink(self._session, timeout))

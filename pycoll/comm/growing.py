"""Adding ranks to a job that runs: the part of a communicator that makes a larger one."""

from __future__ import annotations

from typing import TypeVar

from pycoll.runtime.sessions.grow import grow
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.sessions.shared_use import joined

Job = TypeVar("Job", bound="GrowingJob")


class GrowingJob:
    """The methods of `pycoll.Communicator` for jobs to which ranks are added."""

    _session: Session

    def __init__(self, session: Session) -> None:
        """Wrap a session."""
        self._session = session

    def grow(self: Job, *, timeout: float | None = None) -> Job:
        """Make a communicator of the ranks that are left and of those that wait to join.

        For jobs of ``pycoll run --elastic``, which starts processes again that have died; those
        wait in `pycoll.init`, which returns this communicator to them. Every rank that goes on
        calls this: after a failure, as `shrink`, or when there are `newcomers`, at a point that all
        have agreed on. It waits until the job has as many ranks as it needs at least
        (``-n 2..8``), but for no others. This communicator raises from then on, if it did not
        before, and is still to be closed.

        The new communicator has memory of its own: arrays of this one's symmetric memory stay what
        they are, and are ordinary arrays there. See docs/elastic.md for how states get to the
        newcomers.

        Args:
            timeout: Seconds to wait for all; by default the communicator's.

        Returns:
            The new communicator. Ranks are in the order of their places in the job, so that one
            that was started again has the rank that it had, if nobody is missing.

        Raises:
            CollTimeout: If a rank that lives has not called this in time, or too few ranks came.
                Call it again to go on waiting.
            PeerLost: If the job cannot have enough ranks any more.
            ArgumentError: If ranks cannot be added to this communicator: it is a part of the job,
                or the job is not elastic. The rank may go on.
            CommClosed: If this rank has closed or left the communicator.
        """
        return type(self)(joined().follow(self._session, grow(self._session, timeout)))

    @property
    def can_grow(self) -> bool:
        """Whether `grow` can add ranks."""
        return self._session.link is not None

    @property
    def epoch(self) -> int:
        """Number of communicators of the whole job before this one: how often it has grown."""
        return self._session.epoch

    @property
    def newcomers(self) -> int:
        """Number of processes that wait for `grow`, as far as this rank has heard.

        It is not a collective: ranks may hear of one at different times.
        """
        return 0 if self._session.link is None else self._session.link.listen()

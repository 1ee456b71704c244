"""A job whose ranks are started again when they die: ``pycoll run --elastic``."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from dataclasses import dataclass

from pycoll.cli.job.meetings import Meetings, pair
from pycoll.cli.job.processes import GRACE_S, Job, end_of, say, signal_group
from pycoll.config import MEETING_VARIABLE

SOON_S = 5.0  # after its start: a rank that dies by then is started again later each time
FIRST_DELAY_S, MOST_DELAY_S = 0.25, 30.0


@dataclass
class _Line:
    """The launcher's end of a rank's socket, watched as the streams are."""

    job: ElasticJob
    place: int
    line: socket.socket

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.line.fileno()

    def pump(self) -> bool:
        """Take a message, or hear that there will be no more."""
        self.job.hear(self.place, self.line)
        return True


class ElasticJob(Job):
    """Places 0..most - 1, in each of which a process runs, one after the other.

    Args:
        least: Fewest ranks of a communicator.
        most: Number of places.
        restarts: How many processes may be started in place of others, over all.
        timeout_s: See `Job`.
        wakeup: See `Job`.
    """

    def __init__(
        self, least: int, most: int, restarts: int, timeout_s: float | None, wakeup: int
    ) -> None:
        super().__init__(most, timeout_s, wakeup, keep_going=True)
        self._least, self._restarts, self._left = least, restarts, restarts
        self._meetings = Meetings(least)
        self._lines: dict[int, _Line] = {}
        self._finished: set[int] = set()
        self._due: dict[int, float] = {}  # when to start a process in a place
        self._started: dict[int, float] = {}
        self._quick: dict[int, int] = {}  # deaths in a row soon after the start
        self._since = 0.0  # of the first death that no communicator has been made after
        self._members: set[int] = set()  # places of the newest communicator that live in it
        self._how: tuple[list[str], bool] = ([], False)

    def start(self, command: list[str], tagged: bool) -> None:
        """Start a process in every place; see `Job.start`."""
        self._how = command, tagged
        super().start(command, tagged)

    def _begin(self, rank: int, command: list[str], tagged: bool) -> None:
        ours, theirs = pair()
        with theirs:
            number = str(theirs.fileno())
            process = self._spawn(
                rank, {MEETING_VARIABLE: number}, (theirs.fileno(),), command, tagged
            )
        self._started[rank] = time.monotonic()
        self._meetings.add(rank, process.pid, ours)
        self._lines[rank] = _Line(self, rank, ours)
        self._selector.register(ours, selectors.EVENT_READ, self._lines[rank])

    def hear(self, place: int, line: socket.socket) -> None:
        """Take a message that a process has sent, or hear that it has left."""
        if not self._meetings.hear(place, line):
            self._leave(place, "left the job")

    def _leave(self, place: int, how: str) -> None:
        if place in self._lines:
            self._selector.unregister(self._lines.pop(place).line)
        self._members.discard(place)
        self._meetings.remove(place, how)

    @property
    def _stopping(self) -> bool:
        """Whether the job is being ended."""
        return bool(self._ending or self._forwarded or self._plan or self._failed)

    def _collect(self) -> None:
        for rank in sorted(self._running):
            status = self._ranks[rank].poll()
            if status is not None:
                self._running.remove(rank)
                self._leave(rank, end_of(status))
                self._take_end(rank, status)
        self._meetings.least = max(1, self._least - len(self._finished))
        self._look_for_stopped()

    def _take_end(self, rank: int, status: int) -> None:
        """Decide what becomes of a place whose process has ended."""
        if status == 0:
            self._finished.add(rank)
            self._due.clear()  # what is over for one is over for those who have not come yet
        elif rank in self._ended:
            return
        elif self._stopping or self._meetings.epoch < 0:
            self._failed.append(rank)
            if not self._plan:
                self._end_after(GRACE_S)
        else:
            self._replace(rank)

    def _replace(self, rank: int) -> None:
        """Start another process in a place, soon."""
        now = time.monotonic()
        what = f"{self._outcome(rank)} (pid {self._ranks[rank].pid})"
        self._since = self._since or now
        signal_group(self._ranks[rank].pid, signal.SIGKILL)  # what it has started
        if self._finished:
            say(f"{what}; others have come to their end, so it is not started again")
        elif not any(there.member for there in self._meetings.places.values()):
            say(f"{what}; no rank is left whose state a new one could get")
            self._give_up(rank, "no rank is left that has been in a communicator of this job")
        elif not self._left:
            say(f"{what}; it is not started again: {self._restarts} restarts have been used")
            if len(self._running) + len(self._due) < self._meetings.least:
                left, least = len(self._running), self._meetings.least
                self._give_up(
                    rank,
                    f"only {left} ranks are left, the job needs {least}, and no more are started",
                )
        else:
            self._left -= 1
            quick = now - self._started[rank] < SOON_S
            self._quick[rank] = self._quick.get(rank, 0) + 1 if quick else 0
            late = max(0, self._quick[rank] - 1)
            delay = min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** (late - 1)) if late else 0.0
            self._due[rank] = now + delay
            soon = f" in {delay:g} s" if delay else ""
            say(f"{what}; started again{soon} ({self._restarts - self._left}/{self._restarts})")

    def _give_up(self, rank: int, why: str) -> None:
        """End the job: its ranks cannot meet any more."""
        self._failed.append(rank)
        self._due.clear()
        self._meetings.end(why)
        self._end_after(GRACE_S)

    def _report_ends(self) -> None:
        """Start what is due, let ranks meet, and end those who have come too late for anything."""
        now = time.monotonic()
        for rank in [place for place, when in self._due.items() if when <= now]:
            del self._due[rank]
            if not self._stopping:
                self._begin(rank, *self._how)
        if self._finished and not self._stopping:
            self._end_newcomers()
        made = self._meetings.consider()
        if made is not None:
            self._tell_made(made)
        self._unreported = [-1] if self._meetings.settle() else []

    def _end_newcomers(self) -> None:
        """End processes that nobody will meet any more: all members have ended well."""
        places = self._meetings.places
        if any(p.member for p in places.values()):
            return
        for place in list(places):
            self._ended.add(place)
            signal_group(self._ranks[place].pid, signal.SIGKILL)

    def _tell_made(self, made: list[int]) -> None:
        came = sorted(set(made) - self._members)
        epoch, first = self._meetings.epoch, self._meetings.epoch == 0
        self._members = set(made)
        if first:
            return
        who = f", new: {', '.join(map(str, came))}" if came else ""
        cost = f", {time.monotonic() - self._since:.2f} s after a death" if self._since else ""
        say(f"communicator {epoch} has {len(made)} ranks{who}{cost}")
        self._since = 0.0

    def _until_next(self) -> float:
        due = min(self._due.values(), default=float("inf"))
        return min(super()._until_next(), max(0.0, due - time.monotonic()))

    def watch(self) -> None:
        """Wait until every place has ended and nothing is to be started."""
        while self._running or (self._due and not self._stopping):
            self._handle_events(self._until_next())

    def close(self) -> None:
        """See `Job.close`."""
        self._meetings.end("the job is being ended")
        super().close()
        self._meetings.close()

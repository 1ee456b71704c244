"""One rank's side of a communicator over MPI."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import CollError, ConcurrentUseError
from pycoll.runtime.arrays.symmetric_memory import PlainMemory
from pycoll.runtime.calls.plans import PlanCache
from pycoll.runtime.calls.prepare import Caller
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.calls.work import QueuedCall
from pycoll.runtime.sessions.reports import describe, raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.hosts import Card, number
from pycoll.types import Kind

_T = TypeVar("_T")
_MOST_AHEAD = 16
_MPICH_COPIES = 8 << 10  # bytes: a smaller message goes through memory that two processes share
_CLOSE_S, _FAILED_S = 10.0, 1.0  # longest time without progress of what peers still have to get
OWN_THREAD = "pycoll"  # name of threads that make calls in two levels


@dataclass
class MpiJob:
    """What all communicators made from one MPI communicator have in common."""

    api: _C.Transport  # MPI's functions with this communicator, or the TCP connections
    comm: Any  # the duplicated communicator of mpi4py, kept alive here
    cards: list[Card]  # host, process and cores of each rank
    hosts: tuple[int, ...]  # number of the host of each rank
    library: str  # name and version of the MPI library
    # number of the next communicator; every rank keeps its own count: see `new_context`
    next_context: int = 1
    threads: bool = True  # any thread may call MPI at any time
    word: str = ""  # tells jobs of the same processes apart, alike on all of them
    # held while the count is changed
    counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    owned: bool = False  # the connections are closed with the last communicator
    # those that are open; no lock, as a garbage collection may close one at any time
    sessions: set[int] = field(default_factory=set)

    def left(self, session: object, failed: bool) -> None:
        """A session has been closed."""
        self.sessions.discard(id(session))
        if self.owned and not self.sessions:
            self.api.close(_FAILED_S if failed else _CLOSE_S)

    def new_context(self, most: Callable[[int], int], leads: bool) -> int:
        """Agree on the number of a new communicator with its other ranks.

        Threads may do so for several communicators at once, on each rank in another order, so no
        lock can be held while ranks talk to each other. They ask for the largest of their counts;
        where another communicator has taken that meanwhile on any rank, all of them try again. Of
        communicators that try at the same time the one with the largest number succeeds.

        Args:
            most: Returns the largest of the numbers that the ranks give it; a collective of them.
            leads: True on one of the ranks.
        """
        ahead = 0
        while True:
            context = most(self.next_context + ahead)
            with self.counting:
                taken = context < self.next_context
                self.next_context = max(self.next_context, context + 1)
            if not most(int(taken)):
                return context
            # Those who have met should not ask for the same once more.
            ahead = os.urandom(1)[0] % _MOST_AHEAD if leads else 0


def _cookie(text: str) -> int:
    """Return the number of a communicator, of which this tells all that tells it from others."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


class MpiSession(Session):
    """Everything one rank needs to take part in one communicator over MPI."""

    messages_kind = "messages of"  # in `place`
    may_leave_early = True  # calls, where the settings have strict="next"

    def __init__(
        self, job: MpiJob, members: list[int], rank: int, context: int, config: Config
    ) -> None:
        """Join.

        Raises:
            TransportError: If the MPI library is not usable.
        """
        self.job = job
        self.members: list[int] = members
        self.memory: PlainMemory = PlainMemory()
        self.threads = False
        self._given_up = 0  # sends whose arrays have been kept
        self._hosts = number([job.hosts[m] for m in members])
        self.cookie: int = _cookie(f"{job.word} {context} {members} {job.cards}")
        cards = [job.cards[m] for m in members]
        engine = raising(
            _C.MessageEngine,
            job.api,
            members,
            rank,
            context,
            timeout_s=config.timeout_s,
            cookie=self.cookie,
            early=self.may_leave_early and config.strict == "next",
        )
        one_host = len({card.host for card in cards}) == 1
        plans = PlanCache(
            engine,
            rank,
            len(members),
            messages=True,
            one_host=one_host,
            copied_bytes=_MPICH_COPIES if job.library.startswith("MPICH ") else 0,
        )
        self._open(
            rank,
            len(members),
            config,
            engine,
            _C.MessagePostbox(engine),
            Caller(plans, self.memory),
        )
        job.sessions.add(id(self))

    @property
    def transport(self) -> str:
        """How the ranks reach each other."""
        return f"{self.job.library}, messages between all ranks"

    @property
    def hosts(self) -> tuple[int, ...]:
        """See `Session.hosts`."""
        return self._hosts

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """What a measurement depends on besides the machine: transport, and ranks per host."""
        counts = Counter(self.hosts)
        sizes = tuple(counts[host] for host in sorted(counts))
        return f"{self.messages_kind} {self.job.library}", sizes

    def start(self, prepared: Prepared, limit: float, async_op: bool) -> Any:
        """Run a prepared call, or put it in the queue."""
        try:
            return super().start(prepared, limit, async_op)
        except BaseException:  # an interrupt, too
            if self._engine is not None and self._engine.failed:
                _C.never_free(prepared)  # nobody can tell the transport to stop
            raise

    def _let_go(self, queued: QueuedCall) -> None:
        if self._engine is None or self._engine.failed:  # MPI may still look at its arrays
            _C.never_free((queued.keep, queued.result))
        super()._let_go(queued)

    def abandon(self, memory: Any) -> None:
        """Keep the memory of a message if it was given up while it was being sent."""
        mail = self._postbox
        if mail is None or mail.given_up > self._given_up:
            self._given_up += 1
            _C.never_free(memory)

    def close_postbox(self) -> None:
        """Keep what the transport may still read: nobody can tell it to stop."""
        for work in list(self.under_way):  # another thread may add one
            if work.sends:
                _C.never_free(work)
        super().close_postbox()

    def prepare_for_exit(self) -> None:
        """Raise ConcurrentUseError if a thread may be in a call."""
        others = {thread.name for thread in threading.enumerate()} - {OWN_THREAD}
        if others != {threading.current_thread().name}:
            raise ConcurrentUseError("a thread that is left may be in a call")

    def end(self) -> None:
        """See `Session.end`; also raise what has become of calls that this rank has left early."""
        try:
            self.guard(self.engine.prove)
        finally:
            super().end()

    def close(self) -> None:
        """See `pycoll.Communicator.close`."""
        engine, in_flight = self._engine, tuple(self._in_flight)
        super().close()
        if in_flight and engine.failed:
            _C.never_free(in_flight)
        if engine is not None:
            self.job.left(self, engine.failed)

    def error(self, kind: str, text: str) -> CollError | MemoryError:
        """Make the exception for a failure of the engine."""
        if kind == "MemoryError":  # this rank's own; the others get `Revoked`
            return MemoryError(text)
        report = self._engine.report() if self._engine else None
        for rank in report["ranks"] if report else ():
            card = self.job.cards[self.members[rank["rank"]]]
            rank["pid"], rank["host"] = card.pid, card.name
        early = self._engine.unproven() if self._engine and self._engine.failed else []
        error = describe(kind, text, report, self.members, early=early)
        if self.observer is not None:
            self.observer.failed(error, report)
        return error

    def new_context(self) -> int:
        """Agree on the number of a new communicator of some of these ranks."""

        def most(number: int) -> int:
            row = np.array([[number]], np.int64)
            return int(self.call(Kind.ALL_GATHER, row, None, "sum", 0, None).max())

        return self.job.new_context(most, self.rank == 0)

    def on_all(self, make: Callable[[], _T]) -> _T:
        """Make what every rank needs for a new communicator; what one cannot make, none keeps.

        Raises:
            PeerRejected: If another rank cannot; what ``make`` raises if this one cannot.
        """
        made: Any = None
        try:
            made = self.refusing(make)
            self.call(Kind.BARRIER, None, None, "sum", 0, None)
        except BaseException:
            if made is not None:
                made.close()
            raise
        return made

    def make_group(self, group: list[int] | None) -> Session | None:
        """Make the session of a part of the ranks; see `make_groups.split`."""
        context = self.new_context()

        def make() -> Session | None:
            if group is None:
                return None
            members, rank = [self.members[r] for r in group], group.index(self.rank)
            return MpiSession(self.job, members, rank, context, replace(self.config))

        return self.on_all(make)

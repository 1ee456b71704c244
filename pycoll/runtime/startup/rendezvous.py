"""At start-up: waiting until every rank has come, and until every rank is ready."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pycoll import _C
from pycoll.errors import CollError, CollTimeout, PeerLost, TransportError, in_words

_BUSY_S, _POLL_S = 0.01, 0.001
_ANSWER_S = 0.5  # for the names of those who have come
_TAG = 30_007  # every MPI has it, users hardly take it, and calls have no such lane (mpi_link.h)
_NOTE = b"pycoll: this rank has waited for others at start-up for too long, and has given up"

_S = TypeVar("_S")


def make_everywhere(
    make: Callable[[], _S],
    exchange: Callable[[str], list[str]],
    undo: Callable[[_S], object] | None = operator.methodcaller("close"),
) -> _S:
    """Make something on every rank, or on none; all ranks call this together.

    `exchange` gathers a text of every rank; `undo` is for what only some could make.

    Raises:
        TransportError: If it failed on other ranks only; the text names them.
        PeerLost: If a rank died on the way.
        BaseException: What `make` has raised on this one.
    """
    made, failure = None, None
    try:
        made = make()
    except BaseException as error:  # an interrupt, too: the others wait
        failure = error
    try:
        said = exchange("" if failure is None else in_words(failure))
    except CollError as error:
        if failure is None:
            raise
        # It says more than that others did not come to hear of it; but not more than that one is
        # dead, with whom others may have gone whose memory this rank could not open then.
        if isinstance(error, PeerLost) and isinstance(failure, CollError):
            raise error from failure
        raise failure from None
    if failure is not None:
        raise failure
    if any(said):
        if undo is not None:
            undo(made)
        texts = (f"rank {rank} cannot join: {text}" for rank, text in enumerate(said) if text)
        raise TransportError("; ".join(texts))
    return made


class Rendezvous:
    """Waits for all ranks of an mpi4py communicator, at every step of start-up.

    A rank that has waited for too long tells all others. They give up too, and tell: so all know
    who has come, and one that comes later hears that it is too late. Nothing is sent otherwise, and
    of the messages on the communicator only those that look like such a note are received.

    Attributes:
        broken: Whether ranks may no longer be at the same step.
    """

    def __init__(self, MPI: Any, comm: Any, timeout_s: float, begun: bool = True) -> None:
        """Prepare."""
        self._MPI, self._comm, self._timeout_s, self._begun = MPI, comm, timeout_s, begun
        self.broken: bool = False

    def await_all(self) -> None:
        """Return when every rank has called this; a collective.

        Raises:
            CollTimeout: On every rank that has come, with the numbers of those that have not.
        """
        # A rank that passes the first knows that all came, but not that none has given up.
        for _ in range(2):
            self.finish(self._comm.Ibarrier)

    def finish(self, begin: Callable[[], Any], *used: Any) -> None:
        """Return when a nonblocking collective of all ranks is done.

        Raises:
            CollTimeout: With the numbers of the ranks that have not come to it.
        """
        self.broken, request = True, None
        try:
            request = begin()  # an interrupt may come before anybody knows what to wait for
            if not self._wait(request):
                here = self._who_came()
                absent = [r for r in range(self._comm.size) if r not in here]
                text = _missing(self._comm.rank, absent, self._timeout_s, self._begun)
                raise CollTimeout(text)
        except BaseException:  # an interrupt, too
            _C.never_free((request, used))
            raise
        self.broken = False

    def _wait(self, request: Any) -> bool:
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self._timeout_s or self._note() is not None:
                return False
            time.sleep(0 if waited < _BUSY_S else _POLL_S)
        return True

    def _note(self) -> int | None:
        """Return who else has given up, if that has come; it can be received then."""
        status = self._MPI.Status()
        if not self._comm.Iprobe(self._MPI.ANY_SOURCE, _TAG, status):
            return None
        return status.source if status.Get_count(self._MPI.BYTE) == len(_NOTE) else None

    def _who_came(self) -> set[int]:
        """Return which ranks have come."""
        comm, byte = self._comm, self._MPI.BYTE
        for peer in range(comm.size):
            if peer != comm.rank:
                comm.Isend([_NOTE, byte], peer, _TAG).Free()
        here, end = {comm.rank}, time.monotonic() + _ANSWER_S
        while time.monotonic() < end and len(here) < comm.size:
            while (peer := self._note()) is not None:
                comm.Recv([bytearray(len(_NOTE)), byte], peer, _TAG)
                here.add(peer)
            time.sleep(_POLL_S)
        return here


def _missing(rank: int, absent: list[int], timeout_s: float, begun: bool) -> str:
    if not absent:
        return (
            f"start-up: the ranks have come more than {timeout_s:g} s after each other; a longer "
            "time limit (PYCOLL_TIMEOUT, timeout=) waits for them"
        )
    names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    have = "has" if len(absent) == 1 else "have"
    if begun:
        return (
            f"start-up: {names} {have} come to it, but not gone on within {timeout_s:g} s: "
            f"stopped, dead or busy. Rank {rank} has given up"
        )
    return (
        f"start-up: {names} {have} not called pycoll.init or pycoll.from_mpi on this communicator "
        f"within {timeout_s:g} s; all of its ranks must. Rank {rank} has given up"
    )

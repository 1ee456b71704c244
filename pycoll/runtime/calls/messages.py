"""Tagged messages in the background, and waiting for whichever of several calls ends first."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _C
from pycoll.config import check_timeout
from pycoll.errors import ArgumentError, CollError, CollTimeout, ConcurrentUseError, kind_of
from pycoll.runtime.calls.work import Work

_FIRST_SLICE_S, _LONGEST_SLICE_S = 2e-4, 1e-2
_FOR_EVER_S = 1e9
_TOLD = "_told"  # attribute of a work that wait_any has told of


class MessageInfo(NamedTuple):
    """What is known of a message before it is received."""

    src: int  # rank that sent it
    tag: int
    nbytes: int


class ObjectReceives(weakref.WeakValueDictionary[int, Any]):
    """The receives of objects that have not ended, in the order of the calls, by number.

    Attributes:
        lock: Of the thread that serves them.
    """

    def __init__(self) -> None:
        """Begin without any."""
        super().__init__()
        self.lock: threading.RLock = threading.RLock()

    def first(self, last: int) -> list[Any]:
        """Return those up to this number; other threads may add some meanwhile."""
        found = [ref() for ref in self.valuerefs()]
        return [receive for receive in found if receive is not None and receive._number <= last]


if TYPE_CHECKING:

    class _Message:
        """A message in the postbox; csrc/bindings/p2p/message_work.h."""

        sends: bool
        _ended: bool
        _error: CollError | None
        _source: int | None
        _session: Any
        _ticket: int
        _memory: Any

        def _begin(self, *what: Any) -> None: ...
        def wait(self, timeout: float | None = None) -> Any: ...
        def _end(self) -> None: ...
        def _take_back(self) -> Any: ...
        def _close(self) -> None: ...

else:
    _Message = _C.Message


class MessageWork(_Message, Work):
    """A message in the background; its array is kept alive until it is done.

    The extension makes these objects, too, without `__init__`.

    Attributes:
        sends: Whether this rank sends it.
    """

    def __init__(self, session: Any, ticket: int, memory: Any, sends: bool) -> None:
        """Hold on to a message in the postbox; ticket 0 stands for one that has been sent."""
        if ticket:
            limit = session.config.timeout_s
            self._begin(session._postbox, session, ticket, memory, sends, limit)

    def done(self) -> bool:
        """Tell whether the message has been sent or received, or has failed, without waiting."""
        if not self._ended and self._over():
            try:
                self.wait()
            except CollError:
                return self._ended
        return self._ended

    def _over(self) -> bool:
        try:
            postbox = self._session.postbox()
            # Between hosts `done` does not tell that a failure has ended all receives.
            failed = not self.sends and getattr(postbox, "failed", False)
            return failed or postbox.done(self._ticket)
        except _C.EngineError:  # the communicator has failed; a wait says why
            return True

    def _fail(self, error: BaseException) -> None:
        """Keep what the message has ended with; raise what has ended only this wait."""
        try:
            self._session.message_failed(error, None, False)
        except (CollTimeout, ConcurrentUseError):
            raise
        except CollError as failure:
            self._error = failure
            if self.sends:
                self._session.abandon(self._memory)
            self._end()

    def forget(self) -> bool:
        """Stop receiving: the array may be changed, and the message is kept for another call.

        Returns:
            Whether it was still to come.

        Raises:
            ConcurrentUseError: If another thread waits for it.
        """
        if self._ended:
            return False
        postbox, memory = self._session.postbox(), self._take_back()
        expected: bool = self._session.messaging(postbox.forget, self._ticket)
        del memory  # nothing comes into it any more
        return expected

    def give_up(self) -> None:
        """Stop sending: the array may be changed.

        Raises:
            CollError: If not all has been taken. Then the communicator is aborted.
            ConcurrentUseError: If another thread waits for it.
        """
        if not self._ended:
            memory = self._take_back()
            self._session.end_send(self._ticket, memory)


def wait_all(works: Sequence[Work], *, timeout: float | None = None) -> list[Any]:
    """Wait for calls in the background, whatever they are.

    Args:
        works: What ``async_op=True``, ``isend`` and ``irecv`` have returned.
        timeout: Seconds for all of them together; by default each has those of its communicator.

    Returns:
        What ``wait`` of each returns.

    Raises:
        ArgumentError: If something else is among them, such as an array.
        CollTimeout: If one is not done in time; all may be waited for again.
        CollError: The first failure, in the order of ``works``.
    """
    works = _calls(works)
    if timeout is None:
        return [work.wait() for work in works]
    until = time.monotonic() + check_timeout(timeout, zero=True)
    return [work.wait(max(0.0, until - time.monotonic())) for work in works]


def wait_any(works: Sequence[Work | None], *, timeout: float | None = None) -> int:
    """Wait until at least one call in the background has ended, well or not.

    Each call is told of once: it may stay in the list, as in MPI.

    Args:
        works: What ``async_op=True``, ``isend`` and ``irecv`` have returned. None, and what
            `wait_any` has told of before, is passed over.
        timeout: Seconds; by default as long as it takes.

    Returns:
        The index of one that has ended; its ``wait`` gives the result, or raises.

    Raises:
        ArgumentError: If there is none to wait for, or something else is among them.
        CollTimeout: If none has ended in time.
    """
    works = _calls(works, or_none=True)
    left = {i: w for i, w in enumerate(works) if w is not None and not getattr(w, _TOLD, False)}
    if not left:
        what = f"told of all {len(works)} before" if works else "been given none"
        raise ArgumentError(f"wait_any has {what}; it needs at least one call to wait for")
    index = _first_to_end(left, timeout)
    setattr(left[index], _TOLD, True)
    return index


def _calls(works: Any, or_none: bool = False) -> list[Any]:
    """Return a list of what has been given, if all of it are calls."""
    if hasattr(works, "wait"):
        raise ArgumentError("one call was given, not a list of calls; its wait() waits for it")
    works = list(works)
    for index, work in enumerate(works):
        if not (hasattr(work, "wait") or (or_none and work is None)):
            raise ArgumentError(
                f"number {index} is {kind_of(work)}, and no call in the background: these are what "
                "async_op=True, isend and irecv return"
            )
    return works


def _first_to_end(works: Mapping[int, Work], timeout: float | None) -> int:
    limit = _FOR_EVER_S if timeout is None else check_timeout(timeout, zero=True)
    until, turn, piece = time.monotonic() + limit, 0, _FIRST_SLICE_S
    in_turn = list(works.values())
    while True:
        for index, work in works.items():
            if work.done():
                return index
        left = until - time.monotonic()
        if left <= 0:
            raise CollTimeout(f"none of {len(works)} calls in the background ended in {limit:g} s")
        try:  # a wait for one of them sees dead peers, and moves all messages
            in_turn[turn % len(in_turn)].wait(min(piece, left))
        except CollTimeout:
            turn, piece = turn + 1, min(2 * piece, _LONGEST_SLICE_S)
        except CollError:
            continue  # it has ended, and raises again when it is waited for

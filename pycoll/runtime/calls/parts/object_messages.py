"""Messages that are Python objects: bytes whose number the receiver learns from the message."""

from __future__ import annotations

import itertools
import time
from typing import Any

from pycoll.config import check_timeout
from pycoll.errors import CollError, CollTimeout, ConcurrentUseError
from pycoll.runtime.calls.message_ends import ANY
from pycoll.runtime.calls.messages import MessageInfo
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.runtime.calls.work import Work
from pycoll.runtime.sessions.session import Session

_NUMBERS = itertools.count()
_SLICE_S = 1e-2  # of a wait: another thread may receive its object


def send(session: Session, x: Any, dst: int, tag: int, pickle: bool, timeout: float | None) -> None:
    """See `Communicator.send_object`."""
    limit = session.limit(timeout)
    data, *message = session.packed_to_send(pack(x, pickle), dst, tag)
    session.deliver(data, message, limit)


def isend(session: Session, x: Any, dst: int, tag: int, pickle: bool) -> Work:
    """See `Communicator.isend_object`."""
    data, *message = session.packed_to_send(pack(x, pickle), dst, tag)
    return session.begin(data, message)


def recv(session: Session, src: int, tag: int, pickle: bool, timeout: float | None) -> Any:
    """See `Communicator.recv_object`."""
    limit = session.limit(timeout)
    if session.object_receives:  # they come first
        return ObjectReceive(session, src, tag, pickle).wait(limit)
    data, sender = session.take_bytes(src, tag, limit)
    return unpack(memoryview(data), pickle, sender)


class ObjectReceive(Work):
    """An object that is to come. It takes its message while somebody waits for it, or asks.

    Messages go to the receives that they fit in the order in which these were called, whichever is
    waited for. One that nobody refers to any more takes none.
    """

    def __init__(self, session: Session, src: int, tag: int, pickle: bool) -> None:
        """Wait in line."""
        session.check_source(src, tag)
        self._session, self._src, self._tag, self._pickle = session, src, tag, pickle
        self._object: Any = None
        self._error: Exception | None = None
        self._number = next(_NUMBERS)
        session.object_receives[self._number] = self

    def done(self) -> bool:
        """Tell whether the object has come, or cannot, without waiting."""
        self._serve_in_order(0.0)
        return not self._waits()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the object, and return it.

        Args:
            timeout: Seconds; by default those of the communicator.

        Raises:
            ArgumentError: If ``timeout`` is no number of seconds, 0 or more, and for an object that
                this rank does not read.
            CollTimeout: If it has not come in time; it may be waited for again.
            CollError: What `recv_object` would have raised.
        """
        session = self._session
        limit = session.limit(None) if timeout is None else check_timeout(timeout, zero=True)
        until, left = time.monotonic() + limit, limit
        self._serve_in_order(min(left, _SLICE_S))
        while self._waits():
            if left <= 0:
                source = "any rank" if self._src == ANY else f"rank {self._src}"
                text = f"recv_object on rank {session.rank}: nothing from {source} in {limit:g} s"
                raise CollTimeout(text)
            self._find(min(left, _SLICE_S))
            left = max(0.0, until - time.monotonic())
            self._serve_in_order(min(left, _SLICE_S))
        if self._error is not None:
            raise self._error
        return self._object

    def _waits(self) -> bool:
        return self._number in self._session.object_receives

    def _serve_in_order(self, limit: float) -> None:
        """Let the receives up to this one take the messages that are there for them.

        One thread at a time: the others wait for it, as long as this.
        """
        receives = self._session.object_receives
        if self._waits() and receives.lock.acquire(timeout=limit):
            try:
                self._serve(receives.first(self._number))
            finally:
                receives.lock.release()

    def _serve(self, line: list[ObjectReceive]) -> None:
        at = 0
        while at < len(line):
            info = line[at]._find() if line[at]._waits() else None
            if info is None:
                at += 1
                continue
            # Of two that fit, the second finds what has come since the first has looked.
            first = next((i for i, receive in enumerate(line) if receive._fits(info)), at)
            if first == at:
                line.pop(at)._receive(info)
            else:
                at = first

    def _find(self, limit: float = 0.0) -> MessageInfo | None:
        """Return what is known of a message for this call, if there is one in time."""
        try:
            return self._session.look(self._src, self._tag, limit)
        except (CollTimeout, ConcurrentUseError):
            raise
        except CollError as error:
            self._end(error)
            return None

    def _fits(self, info: MessageInfo) -> bool:
        return self._waits() and self._src in (ANY, info.src) and self._tag in (ANY, info.tag)

    def _receive(self, info: MessageInfo) -> None:
        session, error = self._session, None
        try:
            data = session.take_found(info, session.limit(None))
            if data is None:  # a `recv_object` of another thread has it
                return
            self._object = unpack(memoryview(data), self._pickle, info.src)
        except (CollTimeout, ConcurrentUseError):
            raise
        except CollError as failure:  # also where it has come, and cannot be read
            error = failure
        self._end(error)

    def _end(self, error: CollError | None) -> None:
        with self._session.object_receives.lock:
            if self._waits():
                self._error = error
                self._session.object_receives.pop(self._number, None)

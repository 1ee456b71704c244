"""Tagged messages between two ranks: send, recv, recv from any rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pycoll import _C
from pycoll.errors import ArgumentError, CollError, ForkedError
from pycoll.torch.calls.caller import Caller
from pycoll.torch.calls.work import Work, done, seconds
from pycoll.torch.errors import BackendTimeout
from pycoll.torch.operations.arguments import single
from pycoll.torch.tensors.layout import Tensors, code, source, store, target

_MAX_TAG = 2**32 - 1
ANY = -1  # a source: any rank
_SWEEP = 64  # from so many pending messages on, those that nobody waits for are checked


class MessageWork(Work):
    """A pending message."""

    def __init__(
        self,
        messages: Messages,
        what: str,
        peer: int,
        ticket: int,
        buffer: torch.Tensor,
        tensors: Tensors,
    ) -> None:
        """Hold on to a message in the postbox; `buffer` is its memory."""
        super().__init__()
        self._messages, self._what, self._ticket = messages, what, ticket
        self._peer = "any rank" if peer == ANY else f"rank {peer}"
        self.buffer = buffer
        self._tensors = tensors
        self._lock = threading.RLock()  # only its owner can release it
        self._ended = False
        self._late: BaseException | None = None  # why the future has failed, if the message has not
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message and return True.

        Args:
            timeout: Longest time to wait; then the message is still pending. By default the time
                limit of the group; if that passes, the group ends, as with any other call: a caller
                of ``send`` or ``recv`` cannot wait again, and may use the tensor.

        Raises:
            BackendTimeout: If it has not come by then.
            DistBackendError: If it cannot come any more, or has another size or type.
        """
        try:
            limit = seconds(timeout)
            return self._wait(limit)
        except BackendTimeout as error:
            if limit is None:
                self._messages.give_up(error)
            raise
        except BaseException as error:
            self._messages.close_if_interrupted(error)
            raise

    def _wait(self, limit: float | None) -> bool:
        if not self._ended:
            self._wait_alone(limit or min(self._messages.caller.timeout_s, threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return True

    def _wait_alone(self, limit: float) -> None:
        """Wait for the message as soon as no other thread does."""
        caller = self._messages.caller
        if caller.background.forked:
            error = ForkedError("this message belongs to the parent process")
            raise caller.error(error, self._what)
        try:
            if not self._lock.acquire(False):
                limit = self._wait_for_lock(limit)
            if not self._ended:
                self._finish(limit)
        finally:  # an interrupt may come as soon as the lock has been taken
            try:
                self._lock.release()
            except RuntimeError:  # it was not
                pass

    def _wait_for_lock(self, limit: float) -> float:
        """Wait for a thread that waits for the message; return the seconds that are left."""
        until = time.monotonic() + limit
        if not self._lock.acquire(timeout=limit):
            raise BackendTimeout(
                f"{self._what} on rank {self._messages.caller.rank}: the message "
                f"{'to' if self._what == 'send' else 'from'} {self._peer} has not come within "
                f"{limit:.3g} s; it is still under way, and another thread waits for it"
            )
        return max(0.0, until - time.monotonic())

    def _finish(self, limit: float) -> None:
        caller = self._messages.caller
        try:
            self._source = self._messages.postbox.wait(self._ticket, limit)
        except _C.EngineError as failure:
            error = caller.error(caller.session.error(*failure.args), self._what)
            late = isinstance(error, TimeoutError) or failure.args[0] == "ConcurrentUseError"
            if late:
                raise error from None  # the message is still pending
            self._error = error
            if self._what == "send":
                self._messages.abandon(self)
        else:
            try:
                if self._what == "recv":
                    store(self.buffer, self._tensors[0])
            except RuntimeError as error:  # the message has come, but its tensor cannot take it
                self._error = error
        self._ended = True
        self._messages.pending.discard(self)

    def is_completed(self) -> bool:
        """Tell whether the message has arrived, or has left."""
        if not self._ended and self._messages.postbox.done(self._ticket):
            try:
                self.wait()
            except dist.DistBackendError:
                return True
        return self._ended

    def source_rank(self) -> int:
        """Return the rank that sent it."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensor, completed by a thread of its own."""
        if self._future is None:
            promise = self._new_future()
            future = self._future_after(promise)
            threading.Thread(target=self._complete, args=(promise,), daemon=True).start()
            self._future = future
        return self._future

    def _failure(self) -> BaseException | None:
        return self._late or self._error

    def _complete(self, promise: torch.futures.Future) -> None:
        try:
            self._wait(None)
        except BaseException as error:  # after a timeout the message is still pending
            self._late = error
        promise.set_result(None)


class Messages:
    """The messages of a process group.

    Attributes:
        caller: Of the group.
        postbox: Where the engine keeps messages.
        pending: Keeps their memory alive.
    """

    def __init__(self, caller: Caller) -> None:
        """Open a postbox."""
        session = caller.session
        self.caller = caller
        self.postbox: _C.Postbox | None = (
            _C.Postbox(session.engine, offers=session.offers)
            if caller.calls.direct
            else _C.MessagePostbox(session.engine)
        )
        self.pending: set[MessageWork] = set()
        self._dropped: list[torch.Tensor] = []  # memory of messages that nobody can wait for
        self._sweep_at = _SWEEP

    def post(self, what: str, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """Send or receive a tensor; `what` is "send" or "recv", and tells which."""
        buffer = None
        try:
            self._sweep()
            buffer, post = self._message(what, tensors, peer, tag)
            session, place = self.caller.session, (buffer.data_ptr(), buffer.nbytes)
            with session.memory.holding(*place) as part:
                ticket = session.guard(post, *place, code(buffer.dtype), peer, tag)
                if part is not None:
                    session.memory.lend(part, self.postbox, ticket)
            if ticket == 0:  # sent
                work: dist.Work = done(tensors)
            else:
                work = MessageWork(self, what, peer, ticket, buffer, tensors)
                self.pending.add(work)
            work.for_cpp = self.caller.for_cpp
            return work
        except CollError as error:
            raise self.caller.error(error, what) from error
        except BaseException as error:
            if buffer is not None:
                self._dropped.append(buffer)  # before all else: the message may have been posted
            self.close_if_interrupted(error)
            raise

    def _sweep(self) -> None:
        """Check all pending messages if they are twice as many as the last check has left.

        So each one is checked a few times, however many there are. The threshold falls with their
        number, so that a busy moment does not keep memory forever.
        """
        count = len(self.pending)
        self._sweep_at = max(_SWEEP, min(self._sweep_at, 4 * count))
        if count >= self._sweep_at:
            for work in tuple(self.pending):
                work.is_completed()
            self._sweep_at = max(_SWEEP, 2 * len(self.pending))

    def _message(
        self, what: str, tensors: Tensors, peer: int, tag: int
    ) -> tuple[torch.Tensor, Callable]:
        """Return the memory of a message, and what posts it."""
        lowest, size = ANY if what == "recv" else 0, self.caller.size
        if not lowest <= peer < size:
            raise ArgumentError(f"rank {peer} is not in this group of {size} ranks")
        if not 0 <= tag <= _MAX_TAG:
            raise ArgumentError(f"tag={tag}; accepted: 0 to {_MAX_TAG}")
        tensor = single(tensors, what)
        if what == "send":
            return source(tensor).cpu(), self.postbox.send
        buffer = target(tensor)
        if not buffer.is_cpu:
            buffer = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        return buffer, self.postbox.recv

    def abandon(self, *works: MessageWork) -> None:
        """Keep the memory of messages that may still be being sent although nobody waits."""
        if not self.caller.calls.direct:
            _C.never_free([work.buffer for work in works if work._what == "send"])

    def close_if_interrupted(self, error: BaseException) -> None:
        """End the group, and then all messages, if an error is an interrupt."""
        if not isinstance(error, Exception):
            self.caller.abort_if_interrupted(error)
            self.close()

    def give_up(self, error: BackendTimeout) -> NoReturn:
        """End the group, and then all messages, because one takes longer than the group allows."""
        rank, session = self.caller.rank, self.caller.session
        with contextlib.suppress(CollError):  # it has ended already
            session.abort(f"rank {rank} gave up waiting for a message: {error}")
        self.close()
        raise BackendTimeout(
            f"{error}. That was the time limit of the group, which is at an end; to wait for a "
            "message for some time only, pass a timeout to the wait() of isend or irecv"
        ) from error

    def close(self) -> None:
        """End all messages; harmless if repeated."""
        self.postbox.close()
        self.abandon(*self.pending)
        if not self.caller.calls.direct:
            _C.never_free(self._dropped)

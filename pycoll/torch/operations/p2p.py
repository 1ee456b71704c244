"""Tagged messages between two ranks: send, recv, recv from any rank."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from pycoll import _C
from pycoll.errors import ArgumentError, CollError, ForkedError
from pycoll.torch.backend.errors import BackendTimeout
from pycoll.torch.calls.work import Tensors, Work, devices_of, done, seconds
from pycoll.torch.operations.arguments import single
from pycoll.torch.tensors.layout import code, source, store, target

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_TAG = 2**32 - 1
_ANY = -1
_SWEEP = 64  # messages under way before those that nobody waits for are first looked at


class MessageWork(Work):
    """A message under way."""

    def __init__(
        self, group: Any, what: str, ticket: int, box: torch.Tensor, tensors: Tensors
    ) -> None:
        """Hold on to a message in the postbox; `box` is its memory."""
        super().__init__()
        self._group, self._what, self._ticket = group, what, ticket
        self._box, self._tensors = box, tensors
        self._lock = threading.RLock()  # to release it is refused to a thread that has it not
        self._ended = False
        self._error: BaseException | None = None
        self._late: BaseException | None = None  # why the future has failed, if the message has not
        self._source = -1
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message and return True.

        Args:
            timeout: Longest time to wait; then the message is still under way. By default it is
                the time limit of the group, which ends the group, as with any other call: whoever
                has called ``send`` or ``recv`` cannot wait again, and may use the tensor.

        Raises:
            BackendTimeout: If it has not come by then.
            DistBackendError: If it cannot come any more, or has another size or type.
        """
        try:
            limit = seconds(timeout)
            return self._await(limit)
        except BackendTimeout as error:
            if limit is None:
                self._group._give_up(error)
            raise
        except BaseException as error:
            self._group._interrupted(error)
            raise

    def _await(self, limit: float | None) -> bool:
        if not self._ended:
            self._wait(limit or min(self._group._timeout_s, threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, limit: float) -> None:
        if self._group._background.forked:
            error = ForkedError("this message belongs to the parent process")
            raise self._group._error(error, self._what)
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
                f"{self._what} on rank {self._group._rank}: the message has not come within "
                f"{limit:.3g} s; it is still under way, and another thread waits for it"
            )
        return max(0.0, until - time.monotonic())

    def _finish(self, limit: float) -> None:
        try:
            self._source = self._group._postbox.wait(self._ticket, limit)
        except _C.EngineError as failure:
            error = self._group._error(self._group._session.error(*failure.args), self._what)
            late = isinstance(error, TimeoutError) or failure.args[0] == "ConcurrentUseError"
            if late:
                raise error from None  # the message is still under way
            self._error = error
            if self._what == "send":
                self._group._abandon(self)
        else:
            try:
                if self._what == "recv":
                    store(self._box, self._tensors[0])
            except RuntimeError as error:  # the message has come, but its tensor takes none
                self._error = error
        self._ended = True
        self._group._under_way.discard(self)

    def is_completed(self) -> bool:
        """Tell whether the message has arrived, or has left."""
        if not self._ended and self._group._postbox.done(self._ticket):
            try:
                self.wait()
            except dist.DistBackendError:
                return True
        return self._ended

    def is_success(self) -> bool:
        """Tell whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if it failed."""
        return self._error

    def synchronize(self) -> None:
        """Wait for the message."""
        self.wait()

    def result(self) -> Tensors:
        """Return the tensor, once the message has ended."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that sent it."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensor, completed by a thread of its own."""
        if self._future is None:
            promise = torch.futures.Future(devices=devices_of(self._tensors))
            future = promise.then(self._deliver)
            threading.Thread(target=self._complete, args=(promise,), daemon=True).start()
            self._future = future
        return self._future

    def _failure(self) -> BaseException | None:
        return self._late or self._error

    def _complete(self, promise: torch.futures.Future) -> None:
        try:
            self._await(None)
        except BaseException as error:  # after a timeout the message is still under way
            self._late = error
        promise.set_result(None)


class Messages:
    """Mixed into a process group."""

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank."""
        return self._post("send", tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receive a tensor of the same size and type from one rank."""
        return self._post("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends first."""
        return self._post("recv", tensors, _ANY, tag)

    def _post(self, what: str, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        box = None
        try:
            self._sweep()
            box, post = self._message(what, tensors, peer, tag)
            ticket = self._session.guard(
                post, box.data_ptr(), box.nbytes, code(box.dtype), peer, tag
            )
            if ticket == 0:  # sent
                return done(tensors)
            work = MessageWork(self, what, ticket, box, tensors)
            self._under_way.add(work)
            return work
        except CollError as error:
            raise self._error(error, what) from error
        except BaseException as error:
            if box is not None:
                self._dropped.append(box)  # before all else: the message may have been posted
            self._interrupted(error)
            raise

    def _sweep(self) -> None:
        """Look at all messages under way, if they are twice as many as the last look has left.

        So each one is looked at a few times, however many there are. The number comes down with
        them, so that those of a busy moment do not stand for memory that is kept ever after.
        """
        count = len(self._under_way)
        self._sweep_at = max(_SWEEP, min(self._sweep_at, 4 * count))
        if count >= self._sweep_at:
            for work in tuple(self._under_way):
                work.is_completed()
            self._sweep_at = max(_SWEEP, 2 * len(self._under_way))

    def _message(
        self, what: str, tensors: Tensors, peer: int, tag: int
    ) -> tuple[torch.Tensor, Callable]:
        lowest = _ANY if what == "recv" else 0
        if not lowest <= peer < self._size:
            raise ArgumentError(f"rank {peer} is not in this group of {self._size} ranks")
        if not 0 <= tag <= _MAX_TAG:
            raise ArgumentError(f"tag={tag}; accepted: 0 to {_MAX_TAG}")
        tensor = single(tensors, what)
        if what == "send":
            return source(tensor).cpu(), self._postbox.send
        box = target(tensor)
        if not box.is_cpu:
            box = torch.empty(box.shape, dtype=box.dtype, device="cpu")
        return box, self._postbox.recv

    def _abandon(self, *works: MessageWork) -> None:
        """Keep the memory of messages that are given up while they may be being sent."""
        if not self._calls.direct:
            _C.never_free([work._box for work in works if work._what == "send"])

    def _interrupted(self, error: BaseException) -> None:
        """End the group, and then all messages, if an error is an interrupt."""
        if not isinstance(error, Exception):
            self._ended_by(error)
            self._close_messages()

    def _give_up(self, error: BackendTimeout) -> NoReturn:
        """End the group, and then all messages, because one takes longer than the group allows."""
        with contextlib.suppress(CollError):  # it is at an end already
            self._session.abort(f"rank {self._rank} gave up waiting for a message: {error}")
        self._close_messages()
        raise BackendTimeout(
            f"{error}. That was the time limit of the group, which is at an end; to wait for a "
            "message for some time only, pass a timeout to the wait() of isend or irecv"
        ) from error

    def _close_messages(self) -> None:
        self._postbox.close()
        self._abandon(*self._under_way)
        if not self._calls.direct:
            _C.never_free(self._dropped)

    def _open_messages(self) -> None:
        session = self._session
        self._postbox = (
            _C.Postbox(session.engine, offers=session.offers)
            if self._calls.direct
            else _C.MessagePostbox(session.engine)
        )
        self._under_way: set[MessageWork] = set()  # keeps their memory alive
        self._dropped: list[torch.Tensor] = []  # memory of those that nobody can wait for
        self._sweep_at = _SWEEP

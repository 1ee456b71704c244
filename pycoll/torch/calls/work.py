"""Calls in progress and calls that are over, as PyTorch sees them."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.torch.backend.errors import BackendTimeout

if TYPE_CHECKING:
    from pycoll.torch.calls.background import Background
    from pycoll.torch.tensors.devices import Fence

Tensors = list[torch.Tensor]


def devices_of(tensors: Tensors) -> list[torch.device]:
    """Return the devices that a future of tensors has to know."""
    return sorted({t.device for t in tensors if not t.is_cpu}, key=str)


def seconds(timeout: timedelta | None) -> float | None:
    """Return the longest time that ``wait`` was told to take, which locks can; None if it was not.

    PyTorch says 0 for no timeout.
    """
    limit = 0.0 if timeout is None else timeout.total_seconds()
    return min(limit, threading.TIMEOUT_MAX) if limit > 0 else None


class Work(dist.Work):
    """What all works of the backend have."""

    _tensors: Tensors

    def get_future_result(self) -> torch.futures.Future:
        """Return a future of how the call ends, the number of a `WorkResult`; it never fails."""
        return self.get_future().then(lambda _: int(self._verdict()))

    def _failure(self) -> BaseException | None:
        """Return the error that the future gives."""
        return self.exception()

    def _verdict(self) -> c10d.WorkResult:
        error = self._failure()
        if error is None:
            return c10d.WorkResult.SUCCESS
        late = isinstance(error, TimeoutError)
        return c10d.WorkResult.TIMEOUT if late else c10d.WorkResult.COMM_ERROR

    def _deliver(self, promise: torch.futures.Future) -> Tensors:
        error = self._failure()
        if error is not None:
            raise error
        return self._tensors


def done(tensors: Tensors) -> DoneWork:
    """Return the work of a call that has ended, with its result."""
    work = DoneWork()  # a constructor in Python would take as long again
    work._tensors = tensors
    return work


class DoneWork(Work):
    """A call that ended before it returned; see `done`."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def synchronize(self) -> None:
        """Do nothing: the result is there."""

    def result(self) -> Tensors:
        """Return the tensors with the result."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a completed future of the result."""
        future = torch.futures.Future(devices=devices_of(self._tensors))
        future.set_result(self._tensors)
        return future


class PendingWork(Work):
    """A call that runs in the background. May be waited for by several threads."""

    def __init__(
        self, tensors: Tensors, background: Background, fence: Fence | None = None
    ) -> None:
        """Make a call that has not ended; the tensors are its result, maybe on a device."""
        super().__init__()
        self._tensors, self._background, self._fence = tensors, background, fence
        self._over: queue.SimpleQueue[bool] = queue.SimpleQueue()  # has something once it has ended
        self._guard = threading.RLock()  # of the fields below
        self.ended = False  # on the host
        self.promised = False  # whether there was a future, for `tell` to complete, when it ended
        self._error: BaseException | None = None
        self._promise: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None

    def end(self, error: BaseException | None) -> None:
        """Say that the call has ended, for whoever runs it; if it is repeated, the first counts."""
        with self._guard:
            if not self.ended:
                self._error, self.promised = error, self._promise is not None
                self.ended = True
        self._over.put(True)

    def tell(self) -> None:
        """Complete the future, unless it is complete; this may run callbacks of the user."""
        if self._promise.done():
            return
        if self._fence is None or self._error is not None:
            self._promise.set_result(None)
        else:
            self._fence.deliver(self._promise, self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call to end and return True; of a device the current stream waits.

        Args:
            timeout: Longest time to wait; the call itself has its own limit.

        Raises:
            BackendTimeout: If it has not ended by then; it goes on and may be waited for again.
            DistBackendError: If it failed.
        """
        if not self.ended:
            limit = seconds(timeout)
            if limit is None:  # which may take as long as the calls may
                self._background.help(self)
            try:
                self._over.get(timeout=limit)
            except queue.Empty:
                late = f"the call has not ended within {limit:.3g} s; it still runs"
                raise BackendTimeout(late) from None
            finally:
                if self.ended:
                    self._over.put(True)  # for the next who waits
        if self._error is not None:
            raise self._error
        if self._fence is not None:
            self._fence.join()
        return True

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return self.ended and (self._fence is None or self._fence.passed())

    def is_success(self) -> bool:
        """Tell whether the call has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it failed."""
        return self._error

    def synchronize(self) -> None:
        """Wait for the call to end."""
        self.wait()

    def result(self) -> Tensors:
        """Return the tensors with the result, once the call has ended."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a future of the result."""
        with self._guard:
            if self._future is None:
                self._promise = torch.futures.Future(devices=devices_of(self._tensors))
                # An error raised in `then` is one for C++ too, unlike that of set_exception.
                self._future = self._promise.then(self._deliver)
                ended = self.ended
            else:
                ended = False
        if ended:
            self.tell()
        return self._future

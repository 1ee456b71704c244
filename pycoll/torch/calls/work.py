"""The works that PyTorch gets: of calls in progress and of calls that have ended."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import CollError, ForkedError
from pycoll.torch.calls.cpp_futures import tensors_after
from pycoll.torch.errors import BackendTimeout, as_torch
from pycoll.torch.tensors.devices import Fence
from pycoll.torch.tensors.layout import Tensors


def seconds(timeout: timedelta | None) -> float | None:
    """Return a time limit of ``wait`` that locks accept; None if there is none: PyTorch says 0."""
    limit = 0.0 if timeout is None else timeout.total_seconds()
    return min(limit, threading.TIMEOUT_MAX) if limit > 0 else None


class Work(dist.Work):
    """What all works of the backend share."""

    _tensors: Tensors
    _error: BaseException | None = None
    for_cpp: bool = False  # whether hooks in C++ may read the future

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

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return a future of how the call ends, the number of a `WorkResult`; it never fails."""
        return self.get_future().then(lambda _: int(self._outcome()))

    def _failure(self) -> BaseException | None:
        """Return the error that the future raises."""
        return self._error

    def _outcome(self) -> c10d.WorkResult:
        error = self._failure()
        if error is None:
            return c10d.WorkResult.SUCCESS
        late = isinstance(error, TimeoutError)
        return c10d.WorkResult.TIMEOUT if late else c10d.WorkResult.COMM_ERROR

    def _new_future(self) -> torch.futures.Future[Any]:
        devices = sorted({t.device for t in self._tensors if not t.is_cpu}, key=str)
        return torch.futures.Future(devices=devices)

    def _future_after(self, promise: torch.futures.Future) -> Any:
        """Return the future of the result, given one that is completed when the call has ended."""
        # An error raised in `then` is one for C++ too, unlike that of set_exception.
        future = promise.then(self._deliver)
        if self.for_cpp and self._tensors and all(t.is_cpu for t in self._tensors):
            return tensors_after(future, self._tensors)
        return future

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


def keep_in_flight(work: dist.Work, tensors: Tensors) -> dist.Work:
    """Return a work that `wait_tensor` waits for, if its tensors may be inputs of a graph.

    That is so inside of ``allow_inflight_collective_as_graph_input_ctx``. PyTorch then keeps a work
    in C++ that waits for the future.
    """
    allowed = getattr(c10d, "_allow_inflight_collective_as_graph_input", None)
    if allowed is not None and allowed():
        lasting = c10d._create_work_from_future(work.get_future())
        for tensor in tensors:
            c10d._register_work(tensor, lasting)
    return work


class DoneWork(Work):
    """A call that ended before it returned; see `done`."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future of the result."""
        promise = self._new_future()
        promise.set_result(self._tensors)
        return self._future_after(promise) if self.for_cpp else promise


class PendingWork(Work):
    """A call that runs in the background. May be waited for by several threads."""

    def __init__(
        self,
        tensors: Tensors,
        help_run: Callable[[PendingWork], None],
        fence: Fence | None = None,
        describe: Callable[[], str] = str,
    ) -> None:
        """Make a call that has not ended.

        Args:
            tensors: Its result.
            help_run: Runs queued calls up to this one, on a thread that waits for it anyway.
            fence: Its place in the work of a device, if the tensors are there.
            describe: Says what the ranks do, for a wait that ends too early.
        """
        super().__init__()
        self._tensors, self._help_run, self._fence = tensors, help_run, fence
        self._describe = describe
        self._over: queue.SimpleQueue[bool] = queue.SimpleQueue()  # not empty once it has ended
        self._pid = os.getpid()
        self._guard = threading.RLock()  # of the fields below
        self.ended: bool = False  # on the host
        # Whether `complete` has to complete a future made before the end.
        self.promised: bool = False
        self._promise: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def end(self, error: BaseException | None) -> None:
        """Note that the call has ended; only the first time counts."""
        with self._guard:
            if not self.ended:
                self._error, self.promised = error, self._promise is not None
                self.ended = True
        self._over.put(True)

    def complete(self) -> None:
        """Complete the future unless it is complete; this may run callbacks of the user."""
        if self._promise.done():
            return
        if self._fence is None or self._error is not None:
            self._promise.set_result(None)
        else:
            self._fence.deliver(self._promise, self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call to end and return True; on a device, make the current stream wait.

        Args:
            timeout: Longest time to wait; the call itself has its own limit.

        Raises:
            BackendTimeout: If it has not ended by then; it goes on and may be waited for again.
            DistBackendError: If it failed.
        """
        if not self.ended:
            limit = seconds(timeout)
            self._refuse_children()
            try:
                if limit is None:  # with a limit it must not run calls, which have their own
                    self._help_run(self)
            except CollError as error:
                raise as_torch(error, "wait") from error
            try:
                self._over.get(timeout=limit)
            except queue.Empty:
                late = f"the call has not ended within {limit:.3g} s; it still runs"
                raise BackendTimeout(late + self._describe()) from None
            finally:
                if self.ended:
                    self._over.put(True)  # for the next who waits
        if self._error is not None:
            raise self._error
        if self._fence is not None:
            self._fence.join()
        return True

    def _refuse_children(self) -> None:
        """Raise in a process that was forked meanwhile, which has no thread to end the call."""
        if not self.ended and os.getpid() != self._pid:
            raise as_torch(ForkedError("this call belongs to the parent process"), "wait")

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return self.ended and (self._fence is None or self._fence.passed())

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result."""
        self._refuse_children()
        with self._guard:
            if self._future is None:
                self._promise = self._new_future()
                self._future = self._future_after(self._promise)
                ended = self.ended
            else:
                ended = False
        if ended:
            self.complete()
        return self._future

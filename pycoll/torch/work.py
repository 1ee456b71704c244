"""Calls in progress, as PyTorch sees them, and the thread that runs the asynchronous ones."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import CommClosed, ConcurrentUseError, ForkedError
from pycoll.torch.errors import BackendTimeout

Tensors = list[torch.Tensor]


class Work(dist.Work):
    """What all works of the backend have."""

    def get_future_result(self) -> torch.futures.Future:
        """Return a future of how the call ends, the number of a `WorkResult`; it never fails."""
        return self.get_future().then(lambda _: int(self._verdict()))

    def _verdict(self) -> c10d.WorkResult:
        error = self.exception()
        if error is None:
            return c10d.WorkResult.SUCCESS
        late = isinstance(error, TimeoutError)
        return c10d.WorkResult.TIMEOUT if late else c10d.WorkResult.COMM_ERROR


class DoneWork(Work):
    """A call that ended before it returned."""

    def __init__(self, tensors: Tensors) -> None:
        """Keep the result."""
        super().__init__()
        self._tensors = tensors

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
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class PendingWork(Work):
    """A call that runs in the background. May be waited for by several threads."""

    def __init__(self, tensors: Tensors, background: Background) -> None:
        """Make a call that has not ended; the tensors are its result."""
        super().__init__()
        self._tensors, self._background = tensors, background
        self._running = threading.Lock()  # held until the call has ended
        self._running.acquire()
        self._guard = threading.Lock()  # of the fields below
        self._ended = False
        self.promised = False  # whether there was a future, for `tell` to complete, when it ended
        self._error: BaseException | None = None
        self._promise: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None

    def end(self, error: BaseException | None) -> None:
        """Say that the call has ended; for whoever runs it, once."""
        with self._guard:
            self._error, self._ended = error, True
            self.promised = self._promise is not None
        self._running.release()

    def tell(self) -> None:
        """Complete the future, which may run callbacks of the user."""
        self._promise.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call to end and return True.

        Args:
            timeout: Longest time to wait; the call itself has its own limit.

        Raises:
            BackendTimeout: If it has not ended by then; it goes on and may be waited for again.
            DistBackendError: If it failed.
        """
        if not self._ended:
            limit = -1.0 if timeout is None else timeout.total_seconds()
            if limit <= 0:  # which may take as long as the calls may
                self._background.help(self)
            if not self._running.acquire(timeout=limit if limit > 0 else -1):
                raise BackendTimeout(f"the call has not ended within {limit:.3g} s; it still runs")
            self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return self._ended

    def is_success(self) -> bool:
        """Tell whether the call has ended without an error."""
        return self._ended and self._error is None

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
                self._promise = torch.futures.Future()
                # An error raised in `then` is one for C++ too, unlike that of set_exception.
                self._future = self._promise.then(self._deliver)
                ended = self._ended
            else:
                ended = False
        if ended:
            self._promise.set_result(None)
        return self._future

    def _deliver(self, promise: torch.futures.Future) -> Tensors:
        if self._error is not None:
            raise self._error
        return self._tensors


class Background:
    """Runs calls one after the other, on threads of its own and on those that wait for them.

    One thread at a time has the turn and runs calls. It hands on the turn before it completes a
    future, because callbacks may wait for calls that come later.
    """

    def __init__(self, name: str) -> None:
        """Name the threads; they are started when they are needed."""
        self._name = name
        self._jobs: deque[tuple[Callable[[], Any], PendingWork]] = deque()
        self._bells: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each job; False: stop
        self._lock = threading.Lock()  # of the fields below
        self._turn = threading.Lock()
        self._runner = 0  # the thread that has the turn
        self._submitted = self._finished = 0
        self._idle = 0  # threads that have the turn or wait for it
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._pid = os.getpid()  # a child made by fork has no threads

    @property
    def busy(self) -> bool:
        """Whether a call is queued or running."""
        return self._submitted != self._finished

    def submit(self, job: Callable[[], Any], tensors: Tensors) -> PendingWork:
        """Queue a call; its work keeps the tensors alive.

        Raises:
            CommClosed: After `stop`.
            ForkedError: In a child of the process.
            ConcurrentUseError: In a signal handler that has interrupted one of these calls.
        """
        self._refuse_nested()
        if os.getpid() != self._pid:
            raise ForkedError("this process group belongs to the parent process")
        work = PendingWork(tensors, self)
        with self._lock:
            if self._stopped:
                raise CommClosed("this process group has been destroyed")
            if self._idle == 0:
                self._start()
            self._submitted += 1
            self._jobs.append((job, work))
            self._bells.put(True)
        return work

    def help(self, work: PendingWork) -> None:
        """Run what is queued up to a call, for as long as no other thread runs any of it.

        This spares whoever waits anyway the waking of a thread.

        Raises:
            ConcurrentUseError: In a signal handler that has interrupted such a call.
        """
        self._refuse_nested()
        self._take_turns(self._tell_helped, work)

    def _refuse_nested(self) -> None:
        if self._runner == threading.get_ident():
            raise ConcurrentUseError("a signal handler used a process group inside a call of it")

    def stop(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            self._stopped = True
            threads, self._threads = self._threads, []
            self._bells.put(False)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        self._idle += 1
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        going = True
        while going:
            going = self._bells.get()
            self._take_turns(self._tell, patient=not going)
        self._bells.put(False)  # for the next thread

    def _take_turns(
        self,
        tell: Callable[[PendingWork], None],
        last: PendingWork | None = None,
        patient: bool = False,
    ) -> None:
        """Run calls one by one until there are no more, or until another thread runs them.

        Args:
            tell: Takes every call that has ended, after the turn has been handed on.
            last: Where to end; by default with the last one.
            patient: Whether to wait for the turn.
        """
        try:
            while (last is None or not last.is_completed()) and self._turn.acquire(patient):
                self._runner = threading.get_ident()
                try:
                    done = self._run_next()
                finally:
                    self._runner = 0
                    self._turn.release()
                if done is None:
                    return
                tell(done)
        finally:
            if self._jobs and not self._turn.locked():
                self._bells.put(True)  # who came while this thread had the turn has gone again

    def _run_next(self) -> PendingWork | None:
        """Run the first call of the queue, for the thread that has the turn."""
        if not self._jobs:
            return None
        job, work = self._jobs.popleft()
        error = None
        try:
            job()
        except BaseException as caught:
            error = caught
        self._finished += 1
        work.end(error)
        return work

    def _tell(self, work: PendingWork) -> None:
        """Complete the future of a call on a thread of this object, which callbacks may block."""
        if work.promised:
            with self._lock:
                self._idle -= 1
                if self._idle == 0 and not self._stopped:
                    self._start()
            work.tell()
            with self._lock:
                self._idle += 1

    @staticmethod
    def _tell_helped(work: PendingWork) -> None:
        """Complete the future of a call on a thread that waits; pass its interrupts on."""
        if work.promised:
            work.tell()
        error = work.exception()
        if error is not None and not isinstance(error, Exception):
            raise error

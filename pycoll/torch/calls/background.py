"""The queue of a group's asynchronous calls, and the threads that run them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from pycoll.errors import CommClosed, ConcurrentUseError, ForkedError
from pycoll.torch.calls.work import PendingWork
from pycoll.torch.tensors.devices import Fence
from pycoll.torch.tensors.layout import Tensors

Complete = Callable[[PendingWork], None]


class Background:
    """Runs calls one after the other, on helper threads and on threads that wait for a call.

    The thread that has the run lock runs calls. It releases the lock before it completes a future,
    because callbacks may wait for later calls.

    Python checks for signals between any two lines, so an interrupt may come there on a thread that
    waits. So a call stays in the queue until it has ended, and the steps after it may be repeated:
    they do whatever an interrupt has skipped.
    """

    def __init__(
        self,
        name: str,
        on_interrupt: Callable[[BaseException], None] | None = None,
        describe: Callable[[], str] = str,
    ) -> None:
        """Name the threads, which start when they are needed.

        Args:
            name: Name of the threads.
            on_interrupt: Called if an interrupt ends a call, whose peers may still wait.
            describe: See `PendingWork`.
        """
        self._name, self._on_interrupt, self._describe = name, on_interrupt, describe
        self.jobs: deque[tuple[Callable[[], Any], PendingWork]] = deque()  # the first may run
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one a job; False: stop
        self._lock = threading.RLock()  # of the fields below; a signal handler may come in it
        self._run_lock = threading.RLock()  # only its owner can release it
        self._runner = 0  # the thread that has the run lock
        self._idle = 0  # threads that run calls or wait for some
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._pid = os.getpid()  # a child made by fork has no threads

    @property
    def busy(self) -> bool:
        """Whether a call is queued or running."""
        return bool(self.jobs)

    def submit(
        self, job: Callable[[], Any], tensors: Tensors, fence: Fence | None = None
    ) -> PendingWork:
        """Queue a call; its work keeps its result, the tensors, alive.

        Raises:
            CommClosed: After `stop`.
            ForkedError: In a child of the process.
            ConcurrentUseError: In a signal handler that has interrupted one of these calls.
        """
        self._refuse()
        work = PendingWork(tensors, self._help_run, fence, self._describe)
        with self._lock:
            if self._stopped:
                raise CommClosed("this process group has been destroyed")
            if self._idle == 0:
                self._start()
            self.jobs.append((job, work))
            self._wakeups.put(True)
        return work

    def _help_run(self, work: PendingWork) -> None:
        """Run the queue up to a call, unless another thread runs it: saves waking a thread."""
        self._refuse()
        self._run_queue(self._complete_here, work)

    def finish(self) -> None:
        """Wait until what is queued has ended."""
        if self.busy:
            self.submit(lambda: None, []).wait()

    def _refuse(self) -> None:
        if self._runner == threading.get_ident() or self._run_lock._is_owned():
            raise ConcurrentUseError("a signal handler used a process group inside a call of it")
        if self.forked:
            raise ForkedError("this process group belongs to the parent process")

    @property
    def forked(self) -> bool:
        """Whether this is a child process: locks that threads of the parent held stay locked."""
        return os.getpid() != self._pid

    def stop(self) -> None:
        """Finish what is queued and end the threads; do nothing in a child of the process."""
        if self.forked:
            return
        with self._lock:
            self._stopped = True
            threads, self._threads = self._threads, []
            self._wakeups.put(False)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        thread.start()
        self._idle += 1
        self._threads.append(thread)

    def _serve(self) -> None:
        going = True
        while going:
            going = self._wakeups.get()
            if not going or not self._runner:  # a runner sends another wakeup for what it leaves
                self._run_queue(self._complete, block=not going)
        self._wakeups.put(False)  # for the next thread

    def _run_queue(
        self, complete: Complete, last: PendingWork | None = None, block: bool = False
    ) -> None:
        """Run calls one by one until there are no more, or until another thread runs them.

        Args:
            complete: Called with every call that has ended, without the run lock.
            last: Where to stop; by default at the end of the queue.
            block: Whether to wait for the run lock.
        """
        try:
            try:
                self._run_all(complete, last, block)
            finally:
                self._leave()
        except BaseException:  # an interrupt, maybe of that
            self._leave()
            raise

    def _leave(self) -> None:
        """Release the run lock if this thread has it, and wake a thread; may be repeated."""
        self._release()
        if self.jobs and not self._runner:
            self._wakeups.put(True)  # threads that came meanwhile have left again

    def _release(self) -> None:
        if self._runner == threading.get_ident():
            self._runner = 0
        if self._run_lock._is_owned():
            self._run_lock.release()

    def _run_all(self, complete: Complete, last: PendingWork | None, block: bool) -> None:
        while (last is None or not last.ended) and self._run_lock.acquire(block):
            self._runner = threading.get_ident()
            if not self.jobs:
                return
            error = self._run_first(complete)
            if last is not None and error is not None and not isinstance(error, Exception):
                raise error  # the interrupt of this thread, which waits

    def _run_first(self, complete: Complete) -> BaseException | None:
        """Run the first call of the queue and return its error; needs the run lock."""
        job, work = self.jobs[0]
        error: BaseException | None = None
        try:
            try:
                if not work.ended:  # else two interrupts have kept it in the queue
                    job()
            except BaseException as caught:
                error = caught
            self._end(work, error, complete)
        except BaseException as interrupt:
            self._end(work, error or interrupt, complete)
            raise
        return error

    def _end(self, work: PendingWork, error: BaseException | None, complete: Complete) -> None:
        """Take the first call, which has ended, from the queue and release; may be repeated."""
        work.end(error)
        error = work.exception()
        if self._runner == threading.get_ident():
            if error is not None and not isinstance(error, Exception) and self._on_interrupt:
                self._on_interrupt(error)
            if self.jobs and self.jobs[0][1] is work:
                self.jobs.popleft()
            self._release()
        complete(work)

    def _complete(self, work: PendingWork) -> None:
        """Complete the future of a call on a helper thread, which callbacks may block."""
        if not work.promised:
            return
        with self._lock:
            self._idle -= 1
            if self._idle == 0 and not self._stopped:
                with contextlib.suppress(
                    RuntimeError
                ):  # no more threads: those that wait run calls
                    self._start()
        work.complete()  # what it raises ends this thread
        with self._lock:
            self._idle += 1

    @staticmethod
    def _complete_here(work: PendingWork) -> None:
        """Complete the future of a call on a thread that waits."""
        if work.promised:
            work.complete()

"""The queue of a group's asynchronous calls, and who runs them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll.errors import CommClosed, ConcurrentUseError, ForkedError
from pycoll.torch.calls.work import PendingWork, Tensors

if TYPE_CHECKING:
    from pycoll.torch.tensors.devices import Fence


class Background:
    """Runs calls one after the other, on threads of its own and on those that wait for them.

    One thread at a time has the turn and runs calls. It hands on the turn before it completes a
    future, because callbacks may wait for calls that come later.

    An interrupt may come between any two lines on a thread that waits: Python looks for signals
    there. So a call is in the queue until it has ended, and the steps that follow it may be
    repeated; whatever an interrupt has left out, they do.
    """

    def __init__(
        self, name: str, interrupted: Callable[[BaseException], None] | None = None
    ) -> None:
        """Name the threads; they are started when they are needed.

        Args:
            name: Name of the threads.
            interrupted: Told of the interrupt of a call, of which the peers may not have heard.
        """
        self._name, self._interrupted = name, interrupted
        self._jobs: deque[tuple[Callable[[], Any], PendingWork]] = deque()  # the first may run
        self._bells: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each job; False: stop
        self._lock = threading.RLock()  # of the fields below; a signal handler may come in it
        self._turn = threading.RLock()  # to release it is refused to a thread that has it not
        self._runner = 0  # the thread that has the turn
        self._idle = 0  # threads that have the turn or wait for it
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._pid = os.getpid()  # a child made by fork has no threads

    @property
    def busy(self) -> bool:
        """Whether a call is queued or running."""
        return bool(self._jobs)

    def submit(
        self, job: Callable[[], Any], tensors: Tensors, fence: Fence | None = None
    ) -> PendingWork:
        """Queue a call; its work keeps the tensors alive.

        Args:
            job: The call.
            tensors: What it gives.
            fence: Its place among the work of a device, if they are there.

        Raises:
            CommClosed: After `stop`.
            ForkedError: In a child of the process.
            ConcurrentUseError: In a signal handler that has interrupted one of these calls.
        """
        self._refuse()
        work = PendingWork(tensors, self, fence)
        with self._lock:
            if self._stopped:
                raise CommClosed("this process group has been destroyed")
            if self._idle == 0:
                self._start()
            self._jobs.append((job, work))
            self._bells.put(True)
        return work

    def help(self, work: PendingWork) -> None:
        """Run what is queued up to a call, for as long as no other thread runs any of it.

        This spares whoever waits anyway the waking of a thread.

        Raises:
            ForkedError: In a child of the process.
            ConcurrentUseError: In a signal handler that has interrupted such a call.
        """
        self._refuse()
        self._take_turns(self._tell_helped, work)

    def _refuse(self) -> None:
        if self._runner == threading.get_ident() or self._turn._is_owned():
            raise ConcurrentUseError("a signal handler used a process group inside a call of it")
        if self.forked:
            raise ForkedError("this process group belongs to the parent process")

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process: what threads there held is held for ever here."""
        return os.getpid() != self._pid

    def stop(self) -> None:
        """Finish what is queued and end the threads; do nothing in a child of the process."""
        if self.forked:
            return
        with self._lock:
            self._stopped = True
            threads, self._threads = self._threads, []
            self._bells.put(False)
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
            going = self._bells.get()
            if not going or not self._runner:  # who runs calls rings again for those that are left
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
            try:
                self._run_all(tell, last, patient)
            finally:
                self._leave()
        except BaseException:  # an interrupt, maybe of that
            self._leave()
            raise

    def _leave(self) -> None:
        """Hand on the turn if this thread has it, and the calls that are left; may be repeated."""
        self._hand_on()
        if self._jobs and not self._runner:
            self._bells.put(True)  # who came while this thread had the turn has gone again

    def _hand_on(self) -> None:
        if self._runner == threading.get_ident():
            self._runner = 0
        if self._turn._is_owned():
            self._turn.release()

    def _run_all(
        self, tell: Callable[[PendingWork], None], last: PendingWork | None, patient: bool
    ) -> None:
        while (last is None or not last.ended) and self._turn.acquire(patient):
            self._runner = threading.get_ident()
            if not self._jobs:
                return
            error = self._run_first(tell)
            if last is not None and error is not None and not isinstance(error, Exception):
                raise error  # the interrupt of this thread, which waits

    def _run_first(self, tell: Callable[[PendingWork], None]) -> BaseException | None:
        """Run the first call of the queue and return its error, for the thread with the turn."""
        job, work = self._jobs[0]
        error: BaseException | None = None
        try:
            try:
                if not work.ended:  # else two interrupts have kept it in the queue
                    job()
            except BaseException as caught:
                error = caught
            self._conclude(work, error, tell)
        except BaseException as interrupt:
            self._conclude(work, error or interrupt, tell)
            raise
        return error

    def _conclude(
        self, work: PendingWork, error: BaseException | None, tell: Callable[[PendingWork], None]
    ) -> None:
        """Say that the first call has ended, and hand on the turn; may be repeated."""
        work.end(error)
        error = work.exception()
        if self._runner == threading.get_ident():
            if error is not None and not isinstance(error, Exception) and self._interrupted:
                self._interrupted(error)
            if self._jobs and self._jobs[0][1] is work:
                self._jobs.popleft()
            self._hand_on()
        tell(work)

    def _tell(self, work: PendingWork) -> None:
        """Complete the future of a call on a thread of this object, which callbacks may block."""
        if not work.promised:
            return
        with self._lock:
            self._idle -= 1
            if self._idle == 0 and not self._stopped:
                with contextlib.suppress(RuntimeError):  # no more threads: who waits runs calls
                    self._start()
        work.tell()  # what it raises ends this thread
        with self._lock:
            self._idle += 1

    @staticmethod
    def _tell_helped(work: PendingWork) -> None:
        """Complete the future of a call on a thread that waits."""
        if work.promised:
            work.tell()

"""The queue of a group's asynchronous calls, and who runs them."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll.errors import CommClosed, ConcurrentUseError, ForkedError
from pycoll.torch.work import PendingWork, Tensors

if TYPE_CHECKING:
    from pycoll.torch.devices import Fence


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
        self._refuse_nested()
        if os.getpid() != self._pid:
            raise ForkedError("this process group belongs to the parent process")
        work = PendingWork(tensors, self, fence)
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
            while (last is None or not last.ended) and self._turn.acquire(patient):
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

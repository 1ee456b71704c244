"""Two-level calls in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import Any

from pycoll.config import check_timeout
from pycoll.errors import CollTimeout, Revoked
from pycoll.runtime.calls.work import Work

_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_LONGEST_S = 1e8  # that a thread can wait for another one


class DeferredCalls:
    """Calls that run, in order, when the program waits for one: where MPI allows one thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        """Note a call."""
        future: Future[Any] = Future()
        self._calls.append((future, lambda: function(*args)))
        return future

    def make(self) -> None:
        """Make all of them."""
        while self._calls:
            future, call = self._calls.popleft()
            try:
                future.set_result(call())
            except Exception as error:  # raised where the program waits for it
                future.set_exception(error)
            except BaseException as error:  # raised here, where it runs
                future.set_exception(Revoked(f"interrupted in this call ({type(error).__name__})"))
                raise

    shutdown = make


class CallThread:
    """Calls that a thread makes, in order.

    A daemon, unlike those of `concurrent.futures`, which the interpreter waits for before it lets a
    session tell its peers that it leaves.
    """

    def __init__(self, name: str) -> None:
        """Begin with none."""
        self._calls: _Calls = SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(
            target=_make_all, args=(self._calls,), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        """Add a call."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*args)))
        return future

    def shutdown(self) -> None:
        """Wait until all calls are made; if that is interrupted, more can be added."""
        apart = threading.current_thread() is not self._thread
        if apart and self._thread.is_alive() and not self._ended:
            wait_for([self.submit(int)])
        self._end()
        if apart:
            self._thread.join()

    def _end(self) -> None:
        self._ended = True
        self._calls.put(None)

    __del__ = _end  # among garbage this may come before `shutdown`


def _make_all(calls: _Calls) -> None:
    while (entry := calls.get()) is not None:
        future, call = entry
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the program waits for it
            future.set_exception(error)
        del entry, future, call  # they keep the session


class TwoLevelWork(Work):
    """A call in the background; see `pycoll.Work`."""

    def __init__(
        self,
        future: Future[Any],
        calls: CallThread | DeferredCalls,
        interrupted: Callable[[str], None],
    ) -> None:
        """Hold on to a call that a thread makes, or that is made later.

        ``interrupted`` tells all ranks, by the name of an exception, that a wait for it has ended.
        """
        self._future, self._calls, self._interrupted = future, calls, interrupted

    def done(self) -> bool:
        """Tell whether the call has ended; where MPI has one thread, make it first."""
        if isinstance(self._calls, DeferredCalls):
            self._calls.make()
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call to end; see `pycoll.Work.wait`."""
        limit = None if timeout is None else min(check_timeout(timeout, zero=True), _LONGEST_S)
        if isinstance(self._calls, DeferredCalls):
            self._calls.make()
        try:
            done = wait_for([self._future], limit).done
        except BaseException as error:
            self._interrupted(type(error).__name__)
            raise
        if not done:
            raise CollTimeout(
                f"the call has not finished within {timeout} s; it still runs and can be waited for"
            )
        return self._future.result()

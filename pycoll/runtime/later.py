"""Calls in two levels that somebody waits for later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from pycoll.errors import CollTimeout
from pycoll.runtime.work import Work, check_patience

_LONGEST_S = 1e8  # that a thread can wait for another one


class Later:
    """Calls that are made when somebody waits for them: where MPI has one thread, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._calls: deque[tuple[Future, Callable[[], Any]]] = deque()

    def submit(self, function: Any, *args: Any) -> Future:
        """Note a call."""
        future: Future = Future()
        self._calls.append((future, lambda: function(*args)))
        return future

    def make(self) -> None:
        """Make all of them."""
        while self._calls:
            future, call = self._calls.popleft()
            try:
                future.set_result(call())
            except Exception as error:  # of whoever waits for it
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

    shutdown = make


class TwoLevelWork(Work):
    """A call in the background; see `pycoll.Work`."""

    def __init__(self, future: Future, calls: ThreadPoolExecutor | Later) -> None:
        """Hold on to a call that a thread makes, or that is made later."""
        self._future, self._calls = future, calls

    def done(self) -> bool:
        """Tell whether the call has ended; where MPI has one thread, make it first."""
        if isinstance(self._calls, Later):
            self._calls.make()
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call to end; see `pycoll.Work.wait`."""
        limit = None if timeout is None else min(check_patience(timeout), _LONGEST_S)
        if isinstance(self._calls, Later):
            self._calls.make()
        if not wait_for([self._future], limit).done:
            raise CollTimeout(
                f"the call has not finished within {timeout} s; it still runs and can be waited for"
            )
        return self._future.result()

"""The thread that writes the traces of all communicators of a process."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pycoll import _C
from pycoll.errors import CollError

_PERIOD_S, _LOOKS = 0.05, 5  # how often all is written, and after how many times one looks


class Traced(Protocol):
    """What is written: one communicator's calls."""

    def move(self) -> None:
        """Move the calls to disk."""
        ...

    def flush(self) -> None:
        """Move all that has been noted to disk."""
        ...

    def look(self) -> None:
        """Note how the process fares, and who is to blame if this rank waits long."""
        ...

    def give_up(self, error: OSError) -> None:
        """Write nothing any more, and say why."""
        ...


class Writer:
    """Moves calls when a quarter of a ring is full, and all else now and then."""

    def __init__(self) -> None:
        self.bell: Any = _C.TraceBell()
        self._pid = os.getpid()
        self._all: tuple[Traced, ...] = ()
        self._changing = threading.RLock()  # a garbage collection may close a communicator anywhere
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, one: Traced) -> None:
        """Write one more."""
        with self._changing:
            self._all = (*self._all, one)
            if self._thread is None:
                self._stopped = threading.Event()
                self._thread = threading.Thread(
                    target=self._work, args=(self._stopped,), name="pycoll trace", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)

    def remove(self, one: Traced) -> None:
        """Write one no longer; the thread ends with the last one."""
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        with self._changing:
            self._all = tuple(other for other in self._all if other is not one)
            thread = None if self._all else self._end()
        self._join(thread)

    def leads(self, one: Traced) -> bool:
        """Whether it is the one to note what is the same for all."""
        return not self._all or self._all[0] is one

    def stop(self) -> None:
        """End the thread, before the interpreter does so, which would leave locks locked."""
        if os.getpid() != self._pid:
            return
        with self._changing:
            thread = self._end()
        self._join(thread)

    def _end(self) -> threading.Thread | None:
        thread, self._thread = self._thread, None
        self._stopped.set()
        self.bell.ring()
        atexit.unregister(self.stop)
        return thread

    def _join(self, thread: threading.Thread | None) -> None:
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self, stopped: threading.Event) -> None:
        seen = 0
        for visit in itertools.count():
            until = time.monotonic() + _PERIOD_S
            while not stopped.is_set() and (left_s := until - time.monotonic()) > 0:
                seen = self.bell.wait(seen, int(1e6 * left_s))
                self._visit(lambda one: one.move())
            if stopped.is_set():
                return
            self._visit(lambda one: one.flush())
            if visit % _LOOKS == 0:
                self._visit(lambda one: one.look())

    def _visit(self, do: Callable[[Traced], None]) -> None:
        for one in self._all:
            try:
                do(one)
            except (CollError, _C.EngineError):  # it ends just now
                pass
            except OSError as error:
                one.give_up(error)


@functools.cache
def writer_of_process() -> Writer:
    """Return the one of this process."""
    return Writer()


os.register_at_fork(after_in_child=writer_of_process.cache_clear)

"""What watches a communicator from inside, where the environment or the program asks for it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll import _C
from pycoll.observe.counters.metrics import Metrics
from pycoll.observe.counters.stats import Counts

if TYPE_CHECKING:
    from pycoll.observe.trace.record import Tracer


class Watcher:
    """The observer of a session: its trace, its metrics, and where its errors are written."""

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self.errors: int = 0
        self.attached: bool = False  # to what the settings ask for
        self.tracer: Tracer | None = None
        self.metrics: Metrics | None = None
        self._folder: str | os.PathLike[str] = ""  # of the trace
        self._others: list[Watcher] = []  # that are traced because this one is
        self._marks = (0, 0)
        self._dump_dir, self._dumped = session.config.dump_dir, False

    def failed(self, error: BaseException, report: dict[str, Any] | None) -> None:
        """Count an error of the engine, and write what led to the first one."""
        self.errors += 1
        session = self._session()
        if self._dump_dir and not self._dumped and session is not None:
            self._dumped = True
            from pycoll.observe import dump  # takes long to import, as do traces

            dump.write(session, error, report, self._dump_dir)

    def ended(self) -> None:
        """Write what is left: the communicator is closed."""
        if self.tracer is not None:
            self.tracer.close()
        self.tracer = None
        self.followed()

    def followed(self) -> None:
        """Serve no metrics any more: the communicator that follows this one has the ports."""
        if self.metrics is not None:
            self.metrics.close()
        self.metrics = None

    def collectives(self) -> dict[str, Counts]:
        """Return counts by collective, while calls are traced."""
        return self.tracer.counted() if self.tracer is not None else {}

    def mark(self, marks: tuple[int, int]) -> None:
        """Call functions at these addresses around every call; see `Marks` of csrc/engine."""
        session, self._marks = self._session(), marks
        if self.tracer is None:
            session.guard(session.runner.trace, _C.Trace(0, *marks))  # nobody takes its records

    def start_trace(self, folder: str | os.PathLike[str]) -> None:
        """Trace calls from the next one on, and those of the communicators split from this one."""
        from pycoll.observe.trace.record import Tracer

        session = self._session()
        self.tracer, self._folder = Tracer(session, folder, self._marks), folder
        for child in list(session.children.values()):
            if child.runner is not None:
                self.was_split(child)

    def was_split(self, child: Any) -> None:
        """Trace a session that was split from this one, for as long as this one is traced."""
        if self.tracer is not None and watcher_of(child).tracer is None:
            child.observer._marks = self._marks
            child.observer.start_trace(self._folder)
            self._others.append(child.observer)

    def stop_trace(self) -> None:
        """Trace no more calls."""
        for other in self._others:
            other.stop_trace()
        self._others.clear()
        session = self._session()
        if session is not None and session.device is not None:
            session.device.times.drain()
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return
        tracer.stop()
        if any(self._marks) and session is not None and session.runner is not None:
            self.mark(self._marks)


def watcher_of(session: Any) -> Watcher:
    """Return what watches a session; it is made the first time."""
    if session.observer is None:
        session.observer = Watcher(session)
    return session.observer


def note_step(session: Any, samples: int, waited_s: float | None) -> None:
    """Tell a trace under way what this rank had in a step of training, and how long it waited."""
    watcher = session.observer
    if watcher is not None and watcher.tracer is not None:
        watcher.tracer.note_step(samples, waited_s)


def attach(session: Any, marks: Callable[[], tuple[int, int]], metrics: bool = True) -> None:
    """Begin what the settings of a new session ask for, metrics only of a job's communicator.

    Args:
        session: The session.
        marks: Returns what marks calls for NVTX.
        metrics: Whether it may have metrics.

    Raises:
        ArgumentError: If that cannot be.
        CudaUnavailable: If calls are to be ranges of NVTX, and there is no device library.
    """
    config, watcher = session.config, session.observer
    if watcher is not None and watcher.attached:
        return
    if config.dump_dir or config.trace_dir or config.metrics_port or config.nvtx:
        watcher = watcher_of(session)
        watcher.attached = True
        if config.nvtx:
            watcher.mark(marks())
        if config.trace_dir and watcher.tracer is None:
            watcher.start_trace(config.trace_dir)
        if metrics and config.metrics_port and (session.members is None or session.follows):
            watcher.metrics = Metrics(session, config.metrics_port, config.metrics_address)

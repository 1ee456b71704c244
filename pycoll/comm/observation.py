"""Counters and traces: the part of a communicator that says what its rank has done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.observe.attach import note_step, watcher_of
from pycoll.observe.counters.stats import Stats, read
from pycoll.observe.counters.telemetry import export
from pycoll.runtime.sessions.session import Session


class Observation:
    """The methods of `pycoll.Communicator` that look at it; none of them is a collective."""

    _session: Session

    def stats(self) -> Stats:
        """Return the counters of this rank.

        They are read where they lie, so that calls cost no more because of them. Bytes and times by
        collective are there while calls are traced. Any thread may ask.

        Raises:
            CommClosed: After `close`.
        """
        return read(self._session)

    def note_step(self, samples: int, waited_s: float | None = None) -> None:
        """Note the end of a step in a trace, if one is under way.

        `pycoll report` then tells a rank with more samples from one that is slow. The engines of
        `pycoll.parallel` do so by themselves.

        Args:
            samples: How many this rank had in the step.
            waited_s: Seconds of the step in which its program waited for communication. What calls
                with ``async_op`` took longer than that was hidden behind work: the overlap.
        """
        note_step(self._session, samples, waited_s)

    def export_metrics(self, meter: Any = None) -> None:
        """Offer the counters of this rank to OpenTelemetry, whose reader asks for them by itself.

        They are those of `stats`, of this communicator and of those split from it, for as long as
        it is open; `docs/slow-job.md` has their names. Where they go, the program tells its SDK.

        Args:
            meter: An ``opentelemetry.metrics.Meter``; by default one of the global provider.

        Raises:
            ArgumentError: If OpenTelemetry is missing.
        """
        export(self._session, meter)

    @contextmanager
    def trace(self, folder: str | os.PathLike[str]) -> Iterator[Path]:
        """Write every call of this rank to a folder, for as long as the context lasts.

        Calls on communicators that were, or are, split from this one are written too, so those of
        the engines of `pycoll.parallel` are. All ranks should trace, to the same folder. ``pycoll
        report FOLDER`` reads it. A tiny call takes up to 0.1 us longer; afterwards calls cost
        what they did before. ``PYCOLL_TRACE`` traces all of a job instead.

        Args:
            folder: Where the files go; it is made.

        Raises:
            ArgumentError: If it cannot be written, or if there is a trace under way.
        """
        watcher = watcher_of(self._session)
        if watcher.tracer is not None:
            raise ArgumentError("trace: the calls of this communicator are traced already")
        watcher.start_trace(folder)
        try:
            yield Path(folder)
        finally:
            watcher.stop_trace()

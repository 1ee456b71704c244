"""Calls on a device as a trace has them: when they began and ended there, on the host's clock.

An event of CUDA has a time that can only be compared with that of another event. So now and then an
event is put on a stream of its own, where it happens at once, between two readings of the host's
clock: an *anchor*. Between two anchors times of the device become times of the host.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll.cuda.device import arrays
from pycoll.cuda.device.ranges import Ranges
from pycoll.runtime.sessions.session import Session

_EVERY_S = 0.5  # seconds between anchors
_TRIES = 5  # events for an anchor; the one that came fastest counts
_PATIENCE_NS = 2_000_000  # to wait for one of them
_DRAIN_S = 2.0  # to wait for calls under way when a trace ends
_SHORT_NS = 10_000_000  # between anchors: too short to tell how fast the clock of a device goes
_EVENT_NS = 500  # what the time of an event is rounded to, as CUDA documents it
_ROUNDED = 2.0**-23  # part of an elapsed time, which is a float of 32 bits

What = Callable[[], tuple[str, int]]


class Anchor(NamedTuple):
    """An event of a device, and when it happened.

    Attributes:
        event: The event.
        host_ns: The host's clock, in the middle between before and after.
        error_ns: Half of what lay between.
    """

    event: Any
    host_ns: int
    error_ns: int


class _Span(NamedTuple):
    """A call: what it is, its stream, when it was launched, its anchor, first and last event."""

    what: What
    stream: int
    launched_ns: int
    anchor: Anchor
    first: Any
    last: Any


class DeviceTimes:
    """Tells the trace of a session, if there is one, what its device does."""

    def __init__(self, session: Session, device: int) -> None:
        """Begin with nothing; CUDA is not asked for anything before a trace wants it."""
        self._session, self._device = session, device
        self._ranges = Ranges() if session.config.nvtx else None
        self._pending: deque[_Span] = deque()
        self._anchor: Anchor | None = None
        self._stream: Any = None  # of anchors

    def run(self, launch: Callable[[], None], what: What, stream: int, capturing: bool) -> None:
        """Launch something on a stream of the current device, between two events if that is traced.

        Args:
            launch: Puts it on the stream.
            what: Returns its name, and its bytes.
            stream: Handle of the stream.
            capturing: A graph is made of it: events would become a part of that.
        """
        if self._ranges is not None:
            self._ranges.begin(what()[0])
        try:
            tracer = self._tracer()
            span = None if tracer is None or capturing else self._begin(what, stream)
            launch()
            if span is not None:
                span.last.record(arrays.external(stream))
                self._pending.append(span)
        finally:
            if self._ranges is not None:
                self._ranges.end()

    def _tracer(self) -> Any:
        observer = self._session.observer
        return None if observer is None else observer.tracer

    def _begin(self, what: What, stream: int) -> _Span | None:
        now = time.monotonic_ns()
        if self._anchor is None or now - self._anchor.host_ns > _EVERY_S * 1e9:
            self._advance()
        if self._anchor is None:
            return None
        event = arrays.cupy().cuda.Event
        span = _Span(what, stream, time.monotonic_ns(), self._anchor, event(), event())
        span.first.record(arrays.external(stream))
        return span

    def _advance(self) -> None:
        """Take an anchor, and tell the trace of all calls that have ended before it."""
        ended = []
        while self._pending and self._pending[0].last.done:  # before the anchor is taken
            ended.append(self._pending.popleft())
        anchor = self._take()
        if anchor is None:  # the device is too busy, so the times of these calls wait
            self._pending.extendleft(reversed(ended))
            return
        tracer = self._tracer()
        for span in ended if tracer is not None else ():
            tracer.note_device(_row(span, anchor))
        self._anchor = anchor

    def _take(self) -> Anchor | None:
        """Let events happen, and return the one whose time is known best."""
        cuda, best = arrays.cupy().cuda, None
        if self._stream is None:
            self._stream = cuda.Stream(non_blocking=True)
        for _ in range(_TRIES):
            event = cuda.Event()
            before = after = time.monotonic_ns()
            event.record(self._stream)
            while not (done := event.done) and after - before < _PATIENCE_NS:
                after = time.monotonic_ns()
            after = time.monotonic_ns()
            found = Anchor(event, (before + after) // 2, (after - before + 1) // 2)
            if done and (best is None or found.error_ns < best.error_ns):
                best = found
        return best

    def drain(self) -> None:
        """Tell the trace of what is under way; for its end."""
        if not self._pending or self._tracer() is None:
            self._pending.clear()
            return
        until = time.monotonic() + _DRAIN_S
        lost = contextlib.suppress(RuntimeError)  # of CUDA, whose device has failed
        with lost, arrays.cupy().cuda.Device(self._device):
            while not self._pending[-1].last.done and time.monotonic() < until:
                time.sleep(0.0002)
            self._advance()
        self._pending.clear()
        self._anchor = None  # the next trace begins with a new one


def _row(span: _Span, after: Anchor) -> list[Any]:
    """Return what a trace has of a call that has ended between two anchors."""
    elapsed = arrays.cupy().cuda.get_elapsed_time
    before, rate = span.anchor, 1.0
    between_ns = elapsed(before.event, after.event) * 1e6
    if between_ns > _SHORT_NS:
        rate = (after.host_ns - before.host_ns) / between_ns
    begin_ns = elapsed(before.event, span.first) * 1e6 * rate
    total_ns = elapsed(span.first, span.last) * 1e6 * rate
    error_ns = max(before.error_ns, after.error_ns) + _EVENT_NS + between_ns * _ROUNDED
    name, nbytes = span.what()
    when = [round(before.host_ns + begin_ns), round(total_ns)]
    return [name, *when, nbytes, span.stream, span.launched_ns, round(error_ns)]

"""Launches on one device: each behind the one before, with its arrays kept until it has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.cuda.device import arrays
from pycoll.runtime.calls.prepared import Prepared


class LaunchOrder:
    """Calls of one rank, or of all virtual ranks, in the order of their launches."""

    def __init__(self) -> None:
        """Begin with none."""
        self._cuda = arrays.cupy().cuda  # once: finding it takes longer than a launch may
        self.last: Any = None  # event behind the newest launch
        self._pending: deque[tuple[Any, Sequence[Prepared]]] = deque()
        self._captured: list[Prepared] = []

    def capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is made of what is put on a stream."""
        return bool(self._cuda.runtime.streamIsCapturing(stream))

    def put(
        self, calls: Sequence[Prepared], stream: int, capturing: bool, launch: Callable[[], None]
    ) -> Any:
        """Launch calls on a stream of the current device; return the event behind them."""
        if self.last is not None and not capturing:  # also on one stream: handles are reused
            self._cuda.runtime.streamWaitEvent(stream, self.last.ptr)
        launch()
        event = self._cuda.Event(disable_timing=True)
        self._cuda.runtime.eventRecord(event.ptr, stream)
        if capturing:  # only the graph keeps these copies alive
            self._captured += [call for call in calls if call.gathers or call.scatters]
        else:
            self.last = event
            self.sweep()
            self._pending.append((event, calls))
        return event

    def sweep(self) -> None:
        """Let go of the arrays of calls that have ended."""
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()

    def clear(self) -> None:
        """Let go of all arrays; nothing may be running."""
        self._pending.clear()
        self._captured.clear()

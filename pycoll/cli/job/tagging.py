"""Passing on what ranks write, line by line, each with the number of its rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of a line that is passed on as a whole
_MOMENT_S = 0.5  # after which a line without an end, such as a prompt, is passed on


class TaggedStream:
    """One output stream of one rank: a pipe on this side, prefixed lines on the other.

    A carriage return ends a line, too: a progress bar becomes a line for each of its states. So
    does a line that stays without end for a moment, or that is very long; what follows of it is
    a line of its own, so that lines of several ranks never share one.

    Args:
        rank: The number written in front of every line.
        source: Read end of the pipe; owned and closed by this object.
        sink: Where lines go; several streams may share it.
    """

    def __init__(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        self._tag = b"[%d] " % rank
        self._source = source
        self._sink = sink
        self._parts: list[bytes] = []  # of the line that has no end yet; joined only once
        self._nbytes = 0
        self._since = 0.0  # when the first of them came
        self._lock = threading.Lock()  # of the three above: a timer passes lines on by itself
        self._timer: threading.Timer | None = None
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._source.fileno()

    def pump(self) -> bool:
        """Pass on the lines that have arrived; return False once the writers are gone."""
        try:
            data = os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        with self._lock:
            self._take(data)
            if self._parts and self._timer is None:
                self._wake_after(_MOMENT_S)
        return bool(data)

    def close(self) -> None:
        """Pass on what is left, also a last line that has no end, and close the pipe."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            with contextlib.suppress(BlockingIOError):  # a child of a rank still has it open
                while data := os.read(self.fileno(), _READ_BYTES):
                    self._take(data)
            self._source.close()
            self._pass_on()

    def _take(self, data: bytes) -> None:
        """Add what was read, and pass on what is whole; at its end a return may be half an end."""
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(0, len(data) - 1)))
        if end:
            self._parts.append(data[:end])
            self._pass_on()
        if rest := data[end:]:
            self._since = self._since if self._parts else time.monotonic()
            self._parts.append(rest)
            self._nbytes += len(rest)
            if self._nbytes > _MOST_BYTES:
                self._pass_on()

    def _pass_on(self) -> None:
        lines = list(_lines(b"".join(self._parts)))
        self._parts.clear()
        self._nbytes = 0
        if lines:
            self._sink.write(b"".join(self._tag + line + b"\n" for line in lines))
            self._sink.flush()

    def _wake_after(self, delay_s: float) -> None:
        self._timer = threading.Timer(delay_s, self._settle)
        self._timer.daemon = True
        self._timer.start()

    def _settle(self) -> None:
        """Pass on a line that has waited for its end for long enough."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # `pump` hears of it, too
            self._timer = None
            if self._parts and not self._source.closed:
                left = self._since + _MOMENT_S - time.monotonic()
                if left > 0:
                    self._wake_after(left)
                else:
                    self._pass_on()


def _lines(text: bytes) -> Iterator[bytes]:
    """Yield what newlines and carriage returns divide; the last end may be missing."""
    *lines, last = text.replace(b"\r\n", b"\n").split(b"\n")
    for line in lines:
        yield from (_states(line) or [b""]) if b"\r" in line else [line]
    yield from _states(last) if b"\r" in last else [last] * bool(last)


def _states(line: bytes) -> list[bytes]:
    """List what carriage returns divide; what is blank was there to be written over."""
    return [piece for piece in line.split(b"\r") if piece.strip()]

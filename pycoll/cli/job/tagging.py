"""Passing on what ranks write, line by line, each with the number of its rank."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import BinaryIO

from pycoll.config import environment

_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of a line that is passed on as a whole
_MOMENT_S = 0.5  # after which a line without an end, such as a prompt, is passed on


class TaggedStream:
    """One output stream of one rank: a pipe on this side, prefixed lines on the other.

    A carriage return ends a line, too: a progress bar becomes a line for each of its states. So
    does a line that stays without end for a moment, or that is very long; what follows of it is
    a line of its own, so that lines of several ranks never share one. On a terminal the numbers of
    ranks have colours, unless ``NO_COLOR`` is set.

    Args:
        rank: The number written in front of every line.
        source: Read end of the pipe; owned and closed by this object.
        sink: Where lines go; several streams may share it.
    """

    def __init__(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        self._tag = b"[%d] " % rank
        if sink.isatty() and not environment().get("NO_COLOR"):
            self._tag = b"\x1b[3%dm%s\x1b[0m" % (1 + rank % 6, self._tag)
        self._source = source
        self._sink = sink
        self._parts: list[bytes] = []  # of the line that has no end yet; joined only once
        self._nbytes = 0
        self.due: float = math.inf  # when to pass them on without an end, see `settle`
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
        self._take(data)
        return bool(data)

    def close(self) -> None:
        """Pass on what is left, also a last line that has no end, and close the pipe."""
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
            if not self._parts:
                self.due = time.monotonic() + _MOMENT_S
            self._parts.append(rest)
            self._nbytes += len(rest)
            if self._nbytes > _MOST_BYTES:
                self._pass_on()

    def _pass_on(self) -> None:
        lines = list(_lines(b"".join(self._parts)))
        self._parts.clear()
        self._nbytes, self.due = 0, math.inf
        if lines:
            left = memoryview(b"".join(self._tag + line + b"\n" for line in lines))
            while left:  # with PYTHONUNBUFFERED, a signal may cut a write short
                left = left[self._sink.write(left) :]
            self._sink.flush()

    def settle(self) -> None:
        """Pass on a line that has waited for its end for long enough."""
        if time.monotonic() >= self.due:
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

"""Passing on what ranks write, line by line, each with the number of its rank."""

from __future__ import annotations

import os
from typing import BinaryIO

_READ_BYTES = 1 << 16


class TaggedStream:
    """One output stream of one rank: a pipe on this side, prefixed lines on the other.

    Args:
        rank: The number written in front of every line.
        source: Read end of the pipe; owned and closed by this object.
        sink: Where lines go; several streams may share it.
    """

    def __init__(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        self._tag = b"[%d] " % rank
        self._source = source
        self._sink = sink
        self._pending = b""
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
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._write(lines)
        return bool(data)

    def close(self) -> None:
        """Pass on what is left, also a last line that has no end, and close the pipe."""
        try:
            data = os.read(self.fileno(), _READ_BYTES)
            while data:
                self._pending += data
                data = os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:  # a process that a rank started still has it open
            pass
        self._source.close()
        if self._pending:
            self._write(self._pending.removesuffix(b"\n").split(b"\n"))

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._sink.write(b"".join(self._tag + line + b"\n" for line in lines))
            self._sink.flush()

"""Messages from one rank to another: the part of a session that sends and receives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError, CommClosed
from pycoll.runtime.arrays import ArrayView, check_output, view

_MAX_TAG = 2**31 - 1


class TaggedMessages:
    """The methods of `pycoll.runtime.session.Session` behind ``send`` and ``recv``."""

    world_size: int
    _engine: Any
    _mailboxes: Any

    def send(self, x: Any, dst: int, tag: int, timeout: float | None) -> None:
        """See `pycoll.Communicator.send`."""
        source = view(x, "x")
        array = np.ascontiguousarray(source.array)
        self._check_peer("dst", dst, 0)
        limit = self._limit(timeout)
        pointer = ArrayView(array, source.dtype, source.name, x).pointer
        self.guard(
            self.boxes().send, pointer, array.nbytes, source.code, dst, self._tag(tag), limit
        )

    def recv(self, x: Any, src: int, tag: int, timeout: float | None) -> int:
        """See `pycoll.Communicator.recv`."""
        target = view(x, "x")
        check_output(target, target.array.shape, None, "x")
        self._check_peer("src", src, -1)
        limit = self._limit(timeout)
        nbytes = target.array.nbytes
        return self.guard(
            self.boxes().recv, target.pointer, nbytes, target.code, src, self._tag(tag), limit
        )

    def boxes(self) -> _C.Mailboxes:
        """Return the mailboxes; see `engine`."""
        if self._engine is None:
            raise CommClosed("this communicator has been closed")
        return self._mailboxes

    def _check_peer(self, name: str, peer: int, lowest: int) -> None:
        if not _is_integer(peer) or not lowest <= peer < self.world_size:
            raise ArgumentError(f"{name}={peer!r}; accepted: {lowest} to {self.world_size - 1}")

    def _tag(self, tag: int) -> int:
        if not _is_integer(tag) or not 0 <= tag <= _MAX_TAG:
            raise ArgumentError(f"tag={tag!r}; accepted: 0 to {_MAX_TAG}")
        return int(tag)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

"""Messages from one rank to another: the part of a session that sends and receives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError, CommClosed
from pycoll.runtime.arrays.host_arrays import ArrayView, check_output, view

_MAX_TAG = 2**31 - 1
_MOST_CODES = 256
_CODES: dict[np.dtype, int] = {}
"""The element types of NumPy arrays that were sent or received, and their numbers."""


class TaggedMessages:
    """The methods of `pycoll.runtime.sessions.session.Session` behind ``send`` and ``recv``."""

    world_size: int
    closed_because: str
    _engine: Any
    _mailboxes: Any

    def send(self, x: Any, dst: int, tag: int, timeout: float | None) -> None:
        """See `pycoll.Communicator.send`."""
        plain = _C.stretch(x, False)
        code = None if plain is None else _CODES.get(x.dtype)
        if code is None:
            source = view(x, "x")
            _remember(x, source.code)
            x, code = np.ascontiguousarray(source.array), source.code
            plain = ArrayView(x, source.dtype, source.name, x).pointer, x.nbytes
        self._check_peer("dst", dst, 0)
        limit, number = self._limit(timeout), self._tag(tag)
        boxes = self.boxes()
        try:
            self.guard(boxes.send, *plain, code, dst, number, limit)
        except BaseException:
            self.abandon(x)
            raise

    def recv(self, x: Any, src: int, tag: int, timeout: float | None) -> int:
        """See `pycoll.Communicator.recv`."""
        plain = _C.stretch(x, True)
        code = None if plain is None else _CODES.get(x.dtype)
        if code is None:
            target = view(x, "x")
            check_output(target, target.array.shape, None, "x")
            plain, code = (target.pointer, target.array.nbytes), target.code
            _remember(x, code)
        self._check_peer("src", src, -1)
        limit, number = self._limit(timeout), self._tag(tag)
        return self.guard(self.boxes().recv, *plain, code, src, number, limit)

    def abandon(self, memory: Any) -> None:
        """Do nothing: in shared memory, who gives up sending takes back what he has offered."""

    def boxes(self) -> _C.Mailboxes:
        """Return the mailboxes; see `engine`."""
        if self._engine is None:
            raise CommClosed(self.closed_because)
        return self._mailboxes

    def _check_peer(self, name: str, peer: int, lowest: int) -> None:
        if not _is_integer(peer) or not lowest <= peer < self.world_size:
            anyone = ", or pycoll.ANY" if lowest < 0 else ""
            raise ArgumentError(f"{name}={peer!r}; accepted: 0 to {self.world_size - 1}{anyone}")

    def _tag(self, tag: int) -> int:
        if not _is_integer(tag) or not 0 <= tag <= _MAX_TAG:
            raise ArgumentError(f"tag={tag!r}; accepted: 0 to {_MAX_TAG}")
        return int(tag)


def _remember(x: Any, code: int) -> None:
    """Note the number of the element type of a NumPy array that `view` has accepted.

    Not that of dates and records, which may be equal and yet have other names: 1000 ms and 1 s.
    """
    if type(x) is np.ndarray and x.dtype.kind not in "mMV" and len(_CODES) < _MOST_CODES:
        _CODES[x.dtype] = code


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

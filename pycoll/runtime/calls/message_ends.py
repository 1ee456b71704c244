"""Ranks and tags of messages, as users give them: the part of a session that checks them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError, kind_of


class _Any(int):
    """A number that says in texts and signatures what it is."""

    def __repr__(self) -> str:
        return "pycoll.ANY"


ANY: int = _Any(_C.ANY)
"""As a source, any rank; as a tag, any tag."""
_MAX_TAG = 2**31 - 1
_MPI_NULL = (-1, -2, -3)  # MPI.PROC_NULL of various libraries


class MessageEnds:
    """What refuses ranks and tags that do not exist."""

    world_size: int
    postbox: Any  # raises CommClosed

    def check_end(self, dst: int, tag: int) -> None:
        """Refuse a rank or a tag that cannot be sent to."""
        self._check_dst(dst)
        self._tag(tag)

    def check_source(self, src: int, tag: int) -> None:
        """Refuse a rank or a tag that nothing can come from."""
        _ = self.postbox()  # raises CommClosed
        self._source(src)
        if tag != ANY:
            self._tag(tag)

    def _check_dst(self, dst: int) -> None:
        if not is_integer(dst):
            raise self._no_rank("dst", dst, "send(x, dst)")
        if not 0 <= dst < self.world_size:
            nobody = "; sendrecv takes None for nobody" if dst in _MPI_NULL else ""
            raise ArgumentError(f"dst={dst!r}; accepted: 0 to {self.world_size - 1}{nobody}")

    def _source(self, src: int) -> int:
        """Return a rank to receive from as the engine has it, which is -1 for any."""
        if is_integer(src) and src == ANY:
            return -1
        if not is_integer(src):
            raise self._no_rank("src", src, "recv(x, src)")
        if not 0 <= src < self.world_size:
            last = self.world_size - 1
            raise ArgumentError(f"src={src!r}; accepted: 0 to {last}, or pycoll.ANY")
        return int(src)

    def _no_rank(self, name: str, given: Any, call: str) -> ArgumentError:
        """Return the error for what is no rank; an array has come in its place."""
        text = f"accepted: 0 to {self.world_size - 1}" + ", or pycoll.ANY" * (name == "src")
        if getattr(given, "shape", ()):
            return ArgumentError(f"{name} is {kind_of(given)}; {text}. The array is first: {call}")
        return ArgumentError(f"{name}={given!r}; {text}")

    def _tag(self, tag: int) -> int:
        if not is_integer(tag) or not 0 <= tag <= _MAX_TAG:
            free = is_integer(tag) and tag in (ANY, -1)
            anyone = "; pycoll.ANY is for recv, probe and iprobe" if free else ""
            raise ArgumentError(f"tag={tag!r}; accepted: 0 to {_MAX_TAG}{anyone}")
        return int(tag)


def is_integer(value: Any) -> bool:
    """Tell whether this is an integer of Python's or NumPy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

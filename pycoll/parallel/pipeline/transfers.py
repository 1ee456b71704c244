"""Arrays on their way from stage to stage: a head with type and shape, then the elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Ledger
from pycoll.parallel.precision import dtype_of

_HEAD = 16  # numbers: type, dimensions, shape; last, a number of the sender
_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool")


class Transfers:
    """Sends and receives arrays of any shape along the ``pp`` axis, counted in a ledger."""

    def __init__(self, channel: Channel, ledger: Ledger) -> None:
        self._comm, self._ledger, self._group = channel.comm, ledger, channel.name

    def send(self, x: Any, to: int, tag: int, number: int = 0, purpose: str = "pipeline") -> None:
        """Send an array to a stage, and a number with it."""
        x = np.ascontiguousarray(x)
        self._ledger.wire[purpose, self._group] += x.nbytes
        head = _head(x)
        head[-1] = number
        with self._ledger.waiting(purpose):
            self._comm.send(head, to, tag + 1)
            self._comm.send(x, to, tag)

    def receive(self, source: int, tag: int, purpose: str = "pipeline") -> tuple[np.ndarray, int]:
        """Return the array that a stage has sent with a tag, and the number with it."""
        head = np.empty(_HEAD, np.int64)
        with self._ledger.waiting(purpose):
            self._comm.recv(head, source, tag + 1)
            x = _empty(head)
            self._comm.recv(x, source, tag)
        return x, int(head[-1])

    def hand_over(self, x: Any, source: int, to: int) -> Any:
        """Send an array from one stage to another; other stages do nothing."""
        if source == to:
            return x
        if self._comm.rank == source:
            self.send(x, to, 0)
        return self.receive(source, 0)[0] if self._comm.rank == to else x

    def share(self, x: Any, source: int) -> Any:
        """Return an array of one stage on all stages."""
        if self._comm.world_size == 1:
            return x
        own = self._comm.rank == source
        head = self._comm.broadcast(
            _head(np.asarray(x)) if own else np.empty(_HEAD, np.int64), source
        )
        array = np.ascontiguousarray(x) if own else _empty(head)
        return self._comm.broadcast(array, source) if array.size else array


def _head(x: np.ndarray) -> np.ndarray:
    if x.dtype.name not in _TYPES or x.ndim > _HEAD - 3:
        raise ArgumentError(
            f"an array of type {x.dtype} with {x.ndim} dimensions cannot go from stage to stage; "
            f"accepted are {', '.join(_TYPES)} and up to {_HEAD - 3} dimensions"
        )
    head = np.zeros(_HEAD, np.int64)
    head[:2] = _TYPES.index(x.dtype.name), x.ndim
    head[2 : 2 + x.ndim] = x.shape
    return head


def _empty(head: np.ndarray) -> np.ndarray:
    return np.empty(tuple(head[2 : 2 + head[1]]), dtype_of(_TYPES[head[0]]))

"""Arrays on their way from stage to stage: a head with type and shape, then the elements.

They travel in the background. What is sent is kept until it has left, and a few receives are posted
before their turn, with the shape that came last from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Ledger
from pycoll.parallel.precision import dtype_of

_HEAD = 16  # numbers: type, dimensions, shape; last, a number of the sender
_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool")


MOST_SENDS = 4
"""Arrays that a stage sends at a time; before there are more, it waits for the oldest."""


class _Coming(NamedTuple):
    """An array that is expected: its head, the array if its shape was guessed, and their works."""

    head: np.ndarray
    array: np.ndarray | None
    works: tuple[Any, ...]
    guess: bytes = b""


class Transfers:
    """Sends and receives arrays of any shape along the ``pp`` axis, counted in a ledger."""

    def __init__(self, channel: Channel, ledger: Ledger) -> None:
        self._comm, self._ledger, self._group = channel.comm, ledger, channel.name
        self._leaving: deque[tuple[tuple[Any, ...], str, Callable[[], str]]] = deque()
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._heads: dict[Any, np.ndarray] = {}

    def post(
        self,
        x: Any,
        to: int,
        tag: int,
        number: int = 0,
        purpose: str = "pipeline",
        place: Callable[[], str] = str,
    ) -> None:
        """Start to send an array to a stage, and a number with it; it must stay as it is.

        `place` gives what it was, for errors.
        """
        x = np.ascontiguousarray(x)
        self._ledger.wire[purpose, self._group] += x.nbytes
        head = _head(x)
        head[-1] = number
        self.finish(MOST_SENDS - 1)
        works = self._comm.isend(head, to, tag + 1), self._comm.isend(x, to, tag)
        self._leaving.append((works, purpose, place))

    def send(self, x: Any, to: int, tag: int, number: int = 0, purpose: str = "pipeline") -> None:
        """Send an array, and wait until it has left."""
        self.post(x, to, tag, number, purpose)
        self.finish()

    def finish(self, left: int = 0) -> None:
        """Wait until no more than so many arrays are on their way."""
        while len(self._leaving) > left:
            works, purpose, place = self._leaving.popleft()
            with self._ledger.waiting(purpose), _placed(place):
                for work in works:
                    work.wait()

    def expect(self, source: int, tag: int, kind: Any) -> None:
        """Post the receive of an array; those of a `kind` mostly have one shape."""
        if (source, tag) in self._coming:
            return
        head, last = np.empty(_HEAD, np.int64), self._heads.get(kind)
        works, array = (self._comm.irecv(head, source, tag + 1),), None
        if last is not None:
            array = _empty(last)
            works += (self._comm.irecv(array, source, tag),)
        guess = b"" if last is None else last[:-1].tobytes()
        self._coming[source, tag] = _Coming(head, array, works, guess)

    def receive(
        self, source: int, tag: int, purpose: str = "pipeline", kind: Any = None
    ) -> tuple[np.ndarray, int]:
        """Return the array that a stage has sent with a tag, and the number with it."""
        self.expect(source, tag, kind)
        head, array, works, guess = self._coming[source, tag]
        with self._ledger.waiting(purpose):
            works[0].wait()
            if array is None or head[:-1].tobytes() != guess:
                for work in works[1:]:  # the message stays for a receive of its shape
                    work.forget()
                array = _empty(head)
                works = works[0], self._comm.irecv(array, source, tag)
                self._coming[source, tag] = _Coming(head, array, works)
            works[1].wait()
        del self._coming[source, tag]
        if kind is not None:
            self._heads[kind] = head
        return array, int(head[-1])

    def drop(self) -> None:
        """Expect nothing any more, after an error."""
        for coming in self._coming.values():
            for work in coming.works:
                work.forget()
        self._coming.clear()
        self._leaving.clear()

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


@contextmanager
def _placed(place: Callable[[], str]) -> Iterator[None]:
    """Note in an error where it comes from (Python 3.11)."""
    try:
        yield
    except Exception as error:
        if (where := place()) and (note := getattr(error, "add_note", None)):
            note(f"in the pipeline: {where}")
        raise


def _head(x: np.ndarray) -> np.ndarray:
    return _head_of(x.dtype, x.shape).copy()


@lru_cache(64)  # looking up the name of a type takes longer than all the rest
def _head_of(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.name not in _TYPES or len(shape) > _HEAD - 3:
        raise ArgumentError(
            f"an array of type {dtype} with {len(shape)} dimensions cannot go from stage to stage; "
            f"accepted are {', '.join(_TYPES)} and up to {_HEAD - 3} dimensions"
        )
    head = np.zeros(_HEAD, np.int64)
    head[:2] = _TYPES.index(dtype.name), len(shape)
    head[2 : 2 + len(shape)] = shape
    return head


def _empty(head: np.ndarray) -> np.ndarray:
    kind, dimensions, *shape = head.tolist()
    return np.empty(shape[:dimensions], dtype_of(_TYPES[kind]))

"""Arrays on their way from stage to stage: a head where type or shape is new, then the elements.

They travel in the background. What is sent is kept until it has left. Receives of large arrays are
posted before their turn, with the shape that came last; small ones wait in a mailbox.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.channels import Channel, Ledger
from pycoll.parallel.precision import dtype_of

_HEAD = 16  # numbers: type, dimensions, shape; last, a number of the sender
_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool")
_HEAD_TYPE = np.uint64  # of no array, so that a head is never taken for one


LARGE = 32 << 10
"""Bytes of arrays whose receives are posted ahead; a mailbox has room for four smaller ones."""
MOST_SENDS = 4
"""Arrays that a stage sends at a time; before there are more, it waits for the oldest."""


class _Form(NamedTuple):
    """What a receiver has to know of an array before it comes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    number: int = 0

    @property
    def size(self) -> tuple[np.dtype, int]:
        """What a message has: arrays of other shapes may have the same."""
        return self.dtype, prod(self.shape)


class _Coming(NamedTuple):
    """An array that is expected, with the form that it has if nothing has changed."""

    form: _Form
    array: np.ndarray
    work: Any


class Transfers:
    """Sends and receives arrays of any shape along the ``pp`` axis, counted in a ledger.

    Those of a `kind` mostly have one form: type, shape and number. A head comes before the first
    one, and before one of another form than the last. Both ends take them in the same order.
    """

    def __init__(self, channel: Channel, ledger: Ledger) -> None:
        self._comm, self._ledger, self._group = channel.comm, ledger, channel.name
        self._leaving: deque[tuple[list[Any], str, Callable[[], str]]] = deque()
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._told: dict[Any, tuple[Any, ...]] = {}
        self._heard: dict[Any, _Form] = {}

    def post(
        self,
        x: Any,
        to: int,
        tag: int,
        number: int = 0,
        purpose: str = "pipeline",
        kind: Any = None,
        place: Callable[[], str] = str,
    ) -> None:
        """Start to send an array to a stage, and a number with it; it must stay as it is.

        `place` gives what it was, for errors.
        """
        x = _one_array(x)
        self._ledger.wire[purpose, self._group] += x.nbytes
        if self.full:
            self.finish(MOST_SENDS - 1)
        form = (x.dtype, x.shape, number)
        works = []
        if kind is None or self._told.get(kind) != form:
            self._told[kind] = form
            works.append(self._comm.isend(_head(_Form(*form)), to, tag))
        works.append(self._comm.isend(x, to, tag))
        if not works[-1].done():  # most have left at once, into a mailbox
            self._leaving.append((works, purpose, place))

    def send(self, x: Any, to: int, tag: int, number: int = 0, purpose: str = "pipeline") -> None:
        """Send an array, and wait until it has left."""
        self.post(x, to, tag, number, purpose)
        self.finish()

    @property
    def full(self) -> bool:
        """Whether the next array waits for an older one to leave."""
        return len(self._leaving) >= MOST_SENDS

    def finish(self, left: int = 0) -> None:
        """Wait until no more than so many arrays are on their way."""
        while len(self._leaving) > left:
            works, purpose, place = self._leaving.popleft()
            with self._ledger.waiting(purpose), _placed(place):
                for work in works:
                    work.wait()

    def expect(self, source: int, tag: int, kind: Any) -> None:
        """Post the receive of an array of a kind, if it will not find room in the mailbox."""
        form = self._heard.get(kind)
        if form is None or form.dtype.itemsize * prod(form.shape) < LARGE:
            return
        if (source, tag) not in self._coming:
            array = np.empty(form.shape, form.dtype)
            work = self._comm.irecv(array, source, tag)
            self._coming[source, tag] = _Coming(form, array, work)

    def receive(
        self, source: int, tag: int, purpose: str = "pipeline", kind: Any = None
    ) -> tuple[np.ndarray, int]:
        """Return the array that a stage has sent with a tag, and the number with it."""
        form = self._heard.get(kind)
        start = time.perf_counter()
        array = None if form is None else self._received(source, tag, form)
        if array is None:
            head = np.empty(_HEAD, _HEAD_TYPE)
            self._comm.recv(head, source, tag)
            form = _form(head)
            array = np.empty(form.shape, form.dtype)
            self._comm.recv(array, source, tag)
            if kind is not None:
                self._heard[kind] = form
        self._ledger.waits[purpose] += time.perf_counter() - start
        return array, form.number

    def _received(self, source: int, tag: int, form: _Form) -> np.ndarray | None:
        """Return the array if it has a form; None if a head is there in its place."""
        coming = self._coming.get((source, tag))
        try:
            if coming is not None and coming.form.size == form.size:
                coming.work.wait()
                del self._coming[source, tag]
                return coming.array.reshape(form.shape)
            if coming is not None:  # no message fits: forms have changed since
                del self._coming[source, tag]
                coming.work.forget()
            array = np.empty(form.shape, form.dtype)
            self._comm.recv(array, source, tag)
        except MismatchError:
            self._coming.pop((source, tag), None)
            return None
        return array

    def drop(self) -> None:
        """Expect nothing any more, after an error."""
        for coming in self._coming.values():
            coming.work.forget()
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
        head = np.empty(_HEAD, _HEAD_TYPE)
        if own:
            x = _one_array(x)
            head = _head(_Form(x.dtype, x.shape))
        form = _form(self._comm.broadcast(head, source))
        array = x if own else np.empty(form.shape, form.dtype)
        return self._comm.broadcast(array, source) if array.size else array


def _one_array(x: Any) -> np.ndarray:
    """Return a contiguous array of the same shape; refuse several, which NumPy would stack."""
    if isinstance(x, (tuple, list)):
        raise ArgumentError(
            f"a {type(x).__name__} cannot go from stage to stage; expected one array. With cut= "
            "layers that pass several on can be in one chunk"
        )
    return np.asarray(x, order="C")


@contextmanager
def _placed(place: Callable[[], str]) -> Iterator[None]:
    """Note in an error where it comes from (Python 3.11)."""
    try:
        yield
    except Exception as error:
        if (where := place()) and (note := getattr(error, "add_note", None)):
            note(f"in the pipeline: {where}")
        raise


@lru_cache(64)
def _head(form: _Form) -> np.ndarray:
    dtype, shape, number = form
    if dtype.name not in _TYPES or len(shape) > _HEAD - 3:
        raise ArgumentError(
            f"an array of type {dtype} with {len(shape)} dimensions cannot go from stage to stage; "
            f"accepted are {', '.join(_TYPES)} and up to {_HEAD - 3} dimensions"
        )
    head = np.zeros(_HEAD, _HEAD_TYPE)
    head[:2] = _TYPES.index(dtype.name), len(shape)
    head[2 : 2 + len(shape)] = shape
    head[-1] = number
    return head


def _form(head: np.ndarray) -> _Form:
    kind, dimensions, *shape, number = head.tolist()
    return _Form(np.dtype(dtype_of(_TYPES[kind])), tuple(shape[:dimensions]), number)

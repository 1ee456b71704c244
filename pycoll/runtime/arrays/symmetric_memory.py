"""The part of the symmetric heap that belongs to this rank, and what lies in it."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, view
from pycoll.runtime.arrays.layouts import Detour, RegisteredPart
from pycoll.runtime.sessions.reports import raising

_MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32  # of a NumPy array
AUTOMATIC_BYTES = 16 << 10  # the least for which it is worth while, see docs/memory.md
_Registered = tuple[int, _C.Registration, Any]  # past the last byte; what keeps the memory


class _Loan(NamedTuple):
    registration: _C.Registration
    hold: _C.Hold
    engine: weakref.ref[_C.Engine | _C.Postbox]
    ticket: int

    def lasts(self) -> bool:
        engine = self.engine()
        if engine is None or getattr(engine, "failed", False):  # of a postbox between hosts
            return False
        try:
            return not engine.done(self.ticket)
        except _C.EngineError:  # the communicator has failed; a wait says why
            return False


class Memory:
    """One rank's region of the heap, shared by all communicators of the rank."""

    def __init__(self, heap: _C.Heap, region: int) -> None:
        """Take the region; it is empty."""
        self.heap: _C.Heap | None = heap
        self.region = region
        self._registered: dict[int, _Registered] = {}  # by first byte
        self._lent: list[_Loan] = []
        self._shown: list[list[Any]] = []

    def __del__(self) -> None:
        """Move back what is registered still: its memory outlives the last communicator."""
        if self.heap is not None and not sys.is_finalizing():
            for start, (_, moved, _) in list(self._registered.items()):
                (self._end if moved.is_there else self._forget)(start)

    def empty(self, shape: int | Sequence[int], dtype: Any, zero: bool = False) -> np.ndarray:
        """See `pycoll.Communicator.empty`."""
        try:
            kind = np.dtype(dtype)
            extent = tuple(operator.index(k) for k in ([shape] if np.ndim(shape) == 0 else shape))
        except TypeError as error:
            raise ArgumentError(f"shape={shape!r}, dtype={dtype!r}: {error}") from None
        if kind.hasobject:
            raise ArgumentError(f"dtype={kind} holds Python objects and cannot be shared")
        if min(extent, default=0) < 0:
            raise ArgumentError(f"shape={shape!r}: dimensions must not be negative")
        if len(extent) > _MOST_AXES:
            raise ArgumentError(f"shape has {len(extent)} dimensions, at most {_MOST_AXES} can be")
        return raising(self.heap.empty, self.region, extent, kind, zero)

    def shown(self) -> list[Any]:
        """Return a list for what peers may read; what is in it at the end stays with the heap.

        For they may still read it when its communicator has failed or gone.
        """
        self._shown.append([])
        return self._shown[-1]

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """See `pycoll.Communicator.symmetric`."""
        before = _C.set_numpy_handler(self.heap.numpy_handler(self.region))
        try:
            yield
        finally:
            _C.set_numpy_handler(before)

    def serve_numpy(self) -> Callable[[], None]:
        """Put arrays of `AUTOMATIC_BYTES` or more that NumPy makes from now on into the heap.

        That is in this thread or asyncio task. What the heap has no room for is ordinary.

        Returns:
            What ends it.
        """
        handler = self.heap.numpy_handler(self.region, AUTOMATIC_BYTES)
        before = _C.set_numpy_handler(handler)

        def end() -> None:
            current = _C.set_numpy_handler(before)
            if current is not handler:  # somebody else's, or in another thread
                _C.set_numpy_handler(current)

        return end

    def register(self, x: Any) -> None:
        """See `pycoll.Communicator.register`."""
        given = view(x, "x")
        array, start = given.array, given.pointer
        _, found = self._last_in(start, start + array.nbytes)
        if found is not None:
            raise ArgumentError("the array, or a part of it, is registered already")
        if not array.flags.c_contiguous:
            raise ArgumentError("x is not C-contiguous; only one stretch of memory can be moved")
        if not array.flags.writeable:
            raise ArgumentError("x is read-only; its memory cannot be moved")
        if self.heap.contains(start, array.nbytes):
            raise ArgumentError("x lies in symmetric memory already")
        moved = _C.Registration(self.heap)
        owner = _owner(array) if isinstance(x, np.ndarray) else None
        keep: Any = x, array  # the view keeps what could be resized, a bytearray, where it is
        if owner is not None:  # nobody else can free the memory, so it need not be kept alive
            keep = weakref.finalize(_keeper(owner), self._end, start)
            keep.atexit = False
        elif hasattr(x, "data_ptr"):  # a tensor, which has other memory after `resize_`
            moved.watch(x.data_ptr)
        self._registered[start] = (start + array.nbytes, moved, keep)  # before it is moved, too
        try:
            raising(moved.move_in, self.region, start, array.nbytes)
        except BaseException:  # an interrupt comes when it has been moved
            self._move_back(start)
            _drop_keeper(owner)
            raise

    def unregister(self, x: Any) -> None:
        """See `pycoll.Communicator.unregister`."""
        given = view(x, "x")
        start = given.pointer
        found = self._registered.get(start)
        if found is None or found[0] != start + given.array.nbytes:
            raise ArgumentError("x is not registered, or is a part of what is")
        moved = found[1]
        self._end_loans()
        if not self._move_back(start):
            lent = any(loan.registration is moved for loan in self._lent)
            whose = "in the background" if lent else "of another thread"
            raise ArgumentError(f"x is in use by a call {whose}; wait for it first")
        _drop_keeper(_owner(given.array))

    def hold(self, parts: Sequence[RegisteredPart]) -> list[_C.Hold]:
        """Keep registered arrays where they are until the last of what this returns has ended.

        Raises:
            ArgumentError: If another thread has unregistered one meanwhile.
        """
        return [raising(_C.Hold, part.registration) for part in parts]

    @contextmanager
    def holding(self, start: int, nbytes: int) -> Iterator[RegisteredPart | None]:
        """Keep a stretch of memory where it is inside ``with``, if all of it is registered."""
        part = self.locate(start, nbytes)
        held = self.hold([] if part is None else [part])
        try:
            yield part
        finally:
            for hold in held:
                hold.end()

    def lend(self, part: RegisteredPart, engine: _C.Engine | _C.Postbox, ticket: int) -> None:
        """Note that what is under way in an engine uses a registered array, which is held."""
        self._end_loans()
        hold = raising(_C.Hold, part.registration)
        self._lent.append(_Loan(part.registration, hold, weakref.ref(engine), ticket))

    def _end_loans(self) -> None:
        """Take back what calls in the background have used; any thread may, while others do."""
        for loan in tuple(self._lent):
            if not loan.lasts():
                loan.hold.end()
                with suppress(ValueError):  # another thread has removed it
                    self._lent.remove(loan)

    def _move_back(self, start: int) -> bool:
        """Make an array's memory its own again, unless a call uses it; tell whether it is."""
        _, moved, keep = self._registered[start]
        try:
            return raising(moved.release_unheld)
        finally:  # an interrupt comes when it has been released
            if not moved.is_in:
                if isinstance(keep, weakref.finalize):
                    keep.detach()
                self._registered.pop(start, None)

    def _end(self, start: int) -> None:
        """Move an array back just before its memory is freed."""
        found = self._registered.get(start)
        if found is None:  # an interrupted `register` or `unregister` has left its finalizer behind
            return
        try:
            raising(found[1].release)
        except BaseException:
            self._forget(start)
            raise
        self._registered.pop(start, None)

    def _forget(self, start: int) -> None:
        """Drop what is known of memory that its owner has given back: it is others' now.

        Its block of the heap is not used again, for pages of it may still be mapped there.
        """
        found = self._registered.pop(start, None)
        if found is not None:
            found[1].forget()

    def registered(self, v: ArrayView) -> RegisteredPart | None:
        """Return where an array lies in the heap if it is a part of a registered one."""
        return self.locate(*_stretch(v))

    def locate(self, start: int, nbytes: int) -> RegisteredPart | None:
        """Return where a stretch of memory lies in the heap if it is a part of a registered one."""
        first, found = self._last_in(start, start + 1)
        if found is None or start + nbytes > found[0]:
            return None
        return RegisteredPart(found[1], start, nbytes, found[1].heap_address + start - first)

    def _last_in(self, start: int, stop: int) -> tuple[int, _Registered | None]:
        """Return the last registered array that reaches into [start, stop), and its first byte.

        What has left these addresses is forgotten.
        """
        while True:
            first = self.heap.alias_below(stop - 1) or 0
            found = self._registered.get(first)  # others may end it meanwhile
            if found is None or found[0] <= start:
                return 0, None
            if found[1].is_there:
                return first, found
            self._forget(first)

    def reach(self, v: ArrayView) -> Detour | None:
        """Return where peers write an array that is not registered; None: where it is."""
        if self.heap.contains(v.pointer, v.array.nbytes):
            return None
        return Detour(self.empty(v.array.shape, v.array.dtype), v.array)

    def within_reach(self, v: ArrayView) -> ArrayView:
        """Return an array, or a copy of it, where peers can read it."""
        if self.holds(v):
            return v
        copy = self.empty(v.array.shape, v.array.dtype)
        copy[...] = v.array
        return v._replace(array=copy, apart=True)

    def has(self, v: ArrayView) -> bool:
        """Whether an array lies in the heap as it was made there."""
        return self.heap.contains(*_stretch(v))

    def holds(self, v: ArrayView) -> bool:
        """Whether peers can reach all of an array."""
        return self.has(v) or self.registered(v) is not None


def _stretch(v: ArrayView) -> tuple[int, int]:
    """Return the first byte of an array, and how many there are to the last one."""
    if v.array.flags.c_contiguous or not v.array.size:
        return v.pointer, v.array.nbytes
    first, last = 0, v.array.itemsize
    for step, extent in zip(v.array.strides, v.array.shape, strict=True):
        first += min(0, step) * (extent - 1)
        last += max(0, step) * (extent - 1)
    return v.pointer + first, last - first


class _Ordinary:
    """Stands for a heap where there is none: makes ordinary arrays."""

    def empty(self, region: int, shape: tuple[int, ...], dtype: Any, zero: bool) -> np.ndarray:
        """Make an array, as a heap does."""
        try:
            return np.zeros(shape, dtype) if zero else np.empty(shape, dtype)
        except ValueError as error:  # more bytes than a word counts
            raise MemoryError(f"shape={shape!r}, dtype={dtype}: {error}") from None


class PlainMemory(Memory):
    """Stands for it where ranks cannot reach each other's memory: all arrays are ordinary ones."""

    def __init__(self) -> None:
        """Take nothing."""
        self.heap: Any | None = None

    def empty(self, shape: int | Sequence[int], dtype: Any, zero: bool = False) -> np.ndarray:
        """Return an ordinary array; refuse what symmetric memory refuses."""
        return Memory(_Ordinary(), 0).empty(shape, dtype, zero)

    def allocating(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()

    def serve_numpy(self) -> Callable[[], None]:
        """Change nothing."""
        return lambda: None

    def register(self, x: Any) -> None:
        """Leave the array where it is."""
        view(x, "x")

    unregister = register

    def locate(self, start: int, nbytes: int) -> RegisteredPart | None:
        """Return None: nothing is registered."""
        return None

    def has(self, v: ArrayView) -> bool:
        """Tell that no array lies where peers reach it."""
        return False

    holds = has


class _Keeper:
    """The base of an array that owns its memory, which it does not keep.

    It ends with the array, but before that memory is freed. References to the array itself may end
    later than its memory, and do so with NumPy 2.5.
    """


def _owner(array: np.ndarray) -> np.ndarray | None:
    """Return the array whose end is the end of the memory, or None if it is no array."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if isinstance(array.base, _Keeper | None) and array.flags.owndata else None


def _keeper(owner: np.ndarray) -> _Keeper:
    if owner.base is None:
        _C.set_base(owner, _Keeper())
    return owner.base


def _drop_keeper(owner: np.ndarray | None) -> None:
    """Take away the base of an array of which no part is registered any more."""
    if owner is not None and owner.base is not None and not weakref.getweakrefcount(owner.base):
        _C.set_base(owner, None)

"""Arrays of other ranks, read and written in place: a part of a communicator."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import numpy as np

from pycoll.comm.memory import SymmetricMemory
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays import atomics
from pycoll.runtime.calls.methods import reports_misuse
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_FIELDS = 3  # of a row: offset in the heap, bytes, what stands for dtype and shape


class Window:
    """The arrays that all ranks have put into one `Communicator.window`.

    Attributes:
        local: This rank's array.
    """

    def __init__(self, heap: Any, local: np.ndarray, places: list[int]) -> None:
        """Take the addresses of the arrays in this process, by rank."""
        self.local = local
        self._arrays: list[np.ndarray] = [_array_at(place, local, heap) for place in places]

    def at(self, rank: int) -> np.ndarray:
        """Return the array of a ``rank``, in its memory: reads and stores take effect there.

        Raises:
            ArgumentError: If there is no such rank.
        """
        ranks = len(self._arrays)
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < ranks:
            raise ArgumentError(f"at({rank!r}): ranks are 0 to {ranks - 1}")
        found: np.ndarray = self._arrays[rank].view()
        return found

    def fetch_add(self, rank: int, where: Any, value: Any) -> Any:
        """Add to elements of the array of a ``rank``; return what they were.

        Each is added to in one step, whichever ranks add to it at the same time, and without a call
        of that rank: a counter that all share, or a histogram. Between two fences an element that
        ranks add to is read by ``fetch_add(rank, where, 0)``.

        Args:
            rank: Whose array.
            where: Which elements, by integers and slices: ``3``, ``(0, 2)``, ``slice(2, 8)``.
            value: A number, or an array of the shape of these elements.

        Returns:
            A number for one element, else an array. Sums of integers wrap; those of floats depend
            on the order in which ranks come.

        Raises:
            ArgumentError: If there is no such rank or element, or the dtype is none of int32,
                int64, uint32, uint64, float32 and float64.
        """
        return atomics.fetch_add(self.at(rank), where, value)

    def compare_swap(self, rank: int, where: Any, expected: Any, value: Any) -> Any:
        """Replace elements of the array of a ``rank`` if ``expected``; return what they were.

        Each in one step, as in `fetch_add`. The rank that gets back what it has expected has
        replaced it, and no other: so one rank of many takes a lock, or a task.

        Args:
            rank: Whose array, of integers.
            where: See `fetch_add`.
            expected: A number, or an array of the shape of these elements.
            value: Likewise.

        Returns:
            A number for one element, else an array.

        Raises:
            ArgumentError: If there is no such rank or element, or the dtype is none of int32,
                int64, uint32 and uint64.
        """
        return atomics.compare_swap(self.at(rank), where, expected, value)

    def __repr__(self) -> str:
        local = self.local
        return f"<pycoll.Window of {len(self._arrays)} arrays {local.dtype}{list(local.shape)}>"


class Windows(SymmetricMemory):
    """The methods of `pycoll.Communicator` for memory of other ranks."""

    @reports_misuse
    def window(self, x: np.ndarray, *, timeout: float | None = None) -> Window:
        """Let every rank read and write the arrays of all others; a collective.

        What one rank stores another one sees after both have called `fence`. Between two fences no
        element may be written by one rank and used by another: nothing orders that.

        Args:
            x: Contiguous array in symmetric memory, as `empty` makes it, with the same shape and
                dtype on every rank. Keep it until all have called `fence` for the last time.
            timeout: See the class.

        Returns:
            A window: ``window.at(rank)`` is the array of that rank.

        Raises:
            ArgumentError: If ``x`` does not lie in symmetric memory, shapes or dtypes differ, or
                the ranks do not share the memory of one host.
        """
        session = self._session
        row, base = session.refusing(lambda: _own(session, x))
        found = session.call(Kind.ALL_GATHER, row, None, "sum", 0, None, None, timeout)
        rows = np.asarray(found).reshape(-1, _FIELDS)
        if odd := [r for r in range(len(rows)) if (rows[r, 1:] != rows[0, 1:]).any()]:
            raise ArgumentError(
                f"the array of rank {odd[0]} has another shape or dtype than that of rank 0: a "
                "window takes arrays that are alike"
            )
        return Window(session.memory.heap, x, [base + int(offset) for offset in rows[:, 0]])

    @reports_misuse
    def fence(self, *, timeout: float | None = None) -> None:
        """Wait until all ranks have called it: then each sees what any has stored before.

        A collective, for what is done by `window`.
        """
        self._session.call(Kind.BARRIER, None, None, "sum", 0, None, None, timeout)


def _array_at(place: int, like: np.ndarray, heap: Any) -> np.ndarray:
    memory: Any = (ctypes.c_char * like.nbytes).from_address(place)
    memory.heap = heap  # stays mapped while there are views
    found: np.ndarray = np.frombuffer(memory, np.uint8).view(like.dtype).reshape(like.shape)
    return found


def _own(session: Session, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Return what the others need to find an array, and where the heap lies in this process."""
    heap = getattr(session.memory, "heap", None)
    if session.control is None or heap is None:
        raise ArgumentError("a window is for ranks that share the memory of one host")
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous or x.nbytes == 0:
        raise ArgumentError("a window takes a C-contiguous NumPy array that is not empty")
    start = x.ctypes.data
    if not heap.contains(start, x.nbytes):
        raise ArgumentError(
            "a window takes an array in symmetric memory; make it with comm.empty (an array that "
            "is only registered is not there)"
        )
    base = _base(heap, start)
    like = zlib.crc32(f"{x.dtype.descr} {x.shape}".encode())
    return np.array([start - base, x.nbytes, like], np.int64), base


def _base(heap: Any, inside: int) -> int:
    """Return the first address of the heap, which is one stretch, from one of its addresses."""
    outside = -1
    while inside - outside > 1:
        middle = (inside + outside) // 2
        if heap.contains(middle, 1):
            inside = middle
        else:
            outside = middle
    return inside

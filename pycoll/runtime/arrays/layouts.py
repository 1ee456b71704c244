"""Where the engine finds arrays that lie elsewhere than it can reach."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll import _C

Copy = tuple[int, int, int]  # to, from, bytes


class Mirror(NamedTuple):
    """Where the engine finds a registered array, or a part of one.

    Attributes:
        registration: The whole array.
        pointer: Address in the caller's memory.
        nbytes: Size of the part.
        address: Address of the same part in the heap.
    """

    registration: _C.Registration
    pointer: int
    nbytes: int
    address: int

    def gather(self) -> None:
        """Bring the heap up to date."""
        self.registration.gather(self.pointer, self.nbytes)

    def scatter(self) -> None:
        """Bring the caller's memory up to date."""
        self.registration.scatter(self.pointer, self.nbytes)

    def copies_in(self) -> list[Copy]:
        """Return the copies that bring the heap up to date."""
        edges = self.registration.edges(self.pointer, self.nbytes)
        return [(mirror, user, nbytes) for user, mirror, nbytes in edges]

    def copies_out(self) -> list[Copy]:
        """Return the copies that bring the caller's memory up to date."""
        return self.registration.edges(self.pointer, self.nbytes)


class Detour(NamedTuple):
    """Symmetric memory in which an array is made that lies elsewhere.

    Attributes:
        made: The array in symmetric memory.
        wanted: Where it belongs.
    """

    made: np.ndarray
    wanted: np.ndarray

    @property
    def address(self) -> int:
        """Where the engine writes."""
        return self.made.ctypes.data

    def copies_in(self) -> list[Copy]:
        """Return none: what is there is overwritten."""
        return []

    def copies_out(self) -> list[Copy]:
        """Return the copy that puts the result where it belongs."""
        return [(self.wanted.ctypes.data, self.made.ctypes.data, self.made.nbytes)]

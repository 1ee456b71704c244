"""The optimizer states of a bucket: in memory, on the host, or in a file that is read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from pycoll.parallel.arrays import namespace
from pycoll.parallel.channels import Ledger
from pycoll.parallel.precision import dtype_of

PART_BYTES = 1 << 20
"""Of one state, in memory at a time: a multiple of the size of a page."""


class States:
    """States of equal size and type.

    In a file, two parts of each are in memory at most: one that is updated, and the next one.
    """

    def __init__(self, size: int, kind: str, storage: Any, ledger: Ledger) -> None:
        """Have no state yet.

        Args:
            size: Elements of each state.
            kind: Name of their type.
            storage: A `Storage` or `HostMemory`; None: where parameters are.
            ledger: Where they are counted.
        """
        self._size, self._dtype = size, dtype_of(kind)
        self._storage, self._ledger = storage, ledger
        self._paged = storage is not None and storage.paged
        self._mapped: list[Any] = []
        self._here: dict[int, Future[None]] = {}
        step = PART_BYTES // self._dtype.itemsize if self._paged else max(1, size)
        self._bounds = [(lo, min(lo + step, size)) for lo in range(0, max(1, size), step)]

    def new(self, like: Any) -> Any:
        """Return a state of zeros, on the device of an array.

        Raises:
            OSError: If the disk is full, or the memory of the host.
        """
        if self._storage is None:
            vector = namespace(like).zeros_like(like, dtype=self._dtype, shape=(self._size,))
            return self._ledger.track(vector, "optimizer")
        self._mapped.append(self._storage.vector(self._size, self._dtype))
        self._ledger.store("optimizer", self._size * self._dtype.itemsize)
        return self._mapped[-1].array

    def prefetch(self, at: int = 0) -> None:
        """Start to read a part of all states."""
        if not self._paged or not self._mapped or at in self._here:
            return
        lo, hi = self._bounds[at]
        self._ledger.hold("optimizer in use", self._nbytes(at))
        self._here[at] = self._storage.later(self._touch, lo, hi)

    def walk(self, following: States | None = None) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each part, which may then be used; read `following` behind it.

        Raises:
            OSError: If a part cannot be read.
        """
        self.prefetch()
        for at, bounds in enumerate(self._bounds):
            if at + 1 < len(self._bounds):
                self.prefetch(at + 1)
            elif following is not None:
                following.prefetch()
            if at in self._here:
                self._here[at].result()
            yield bounds
            if at in self._here:
                self.evict(*bounds)
                del self._here[at]
                self._ledger.hold("optimizer in use", -self._nbytes(at))

    def evict(self, lo: int = 0, hi: int | None = None) -> None:
        """Let the states go to the file."""
        for mapped in self._mapped if self._paged else ():
            mapped.evict(lo, self._size if hi is None else hi)

    def _touch(self, lo: int, hi: int) -> None:
        for mapped in self._mapped:
            mapped.touch(lo, hi)

    def _nbytes(self, at: int) -> int:
        lo, hi = self._bounds[at]
        return (hi - lo) * self._dtype.itemsize * len(self._mapped)

"""Who computes which samples of a step, by their numbers in the whole training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Share:
    """The micro-batches of one rank in one step, made when they are asked for.

    A step has a fixed number of micro-batches, whatever the number of ranks: rank r of n takes
    those from ``r * count // n`` on. So the arrays that layers see have the same shapes on any
    number of ranks, and, with ``order="tree"`` and ``zero`` 0 or 1, powers of two of ranks give the
    same bits.
    """

    def __init__(
        self,
        data: Callable[[int, range], Any],
        step: int,
        sizes: tuple[int, int],
        place: tuple[int, int],
    ) -> None:
        """Take a part of a step: `sizes` are (batch, micro_batches), `place` is (rank, ranks)."""
        (self._batch, self._count), (rank, n) = sizes, place
        self._data, self._step = data, step
        self._first = rank * self._count // n
        self._stop = (rank + 1) * self._count // n

    def __len__(self) -> int:
        return self._stop - self._first

    def samples(self, i: int) -> range:
        """Return the numbers of the samples of this rank's micro-batch i."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        first, at = self._step * self._batch, self._first + i
        return range(
            first + at * self._batch // self._count, first + (at + 1) * self._batch // self._count
        )

    def __getitem__(self, i: int) -> Any:
        return self._data(self._step, self.samples(i))

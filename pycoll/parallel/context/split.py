"""Which positions of a sequence each rank of a context-parallel group has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, namespace

KINDS = ("zigzag", "ring", "ulysses")


@dataclass(frozen=True)
class Context:
    """A sequence that is divided over ranks, each having an equal part of its positions.

    =============  ===============================  ============================================
    kind           positions of rank r of n         attention
    =============  ===============================  ============================================
    ``zigzag``     pieces r and 2 n - 1 - r of 2 n  keys and values go round; equal work
    ``ring``       piece r of n                     keys and values go round; the last rank has
                                                    almost twice the work of the average
    ``ulysses``    piece r of n                     each rank has all positions of some heads
    =============  ===============================  ============================================

    Attributes:
        comm: The ranks, such as ``mesh.cp``.
        kind: ``"zigzag"``, ``"ring"`` or ``"ulysses"``.
    """

    comm: Communicator
    kind: str = "zigzag"

    def __post_init__(self) -> None:
        """Refuse a kind that is not known."""
        if self.kind not in KINDS:
            raise ArgumentError(f"kind={self.kind!r}; accepted: {', '.join(KINDS)}")

    @property
    def count(self) -> int:
        """Number of pieces that the sequence is cut into."""
        return self.comm.world_size * (2 if self.kind == "zigzag" else 1)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the pieces of a rank, in the order in which it has them."""
        return (rank, self.count - 1 - rank) if self.kind == "zigzag" else (rank,)

    def take(self, x: Array, axis: int = 1) -> Array:
        """Return this rank's part of an array that has the whole sequence along an axis.

        Raises:
            ArgumentError: If the length cannot be divided.
        """
        length, n = x.shape[axis], self.comm.world_size
        if length % self.count:
            raise ArgumentError(
                f"a sequence of {length} positions cannot be cut into {self.count} equal pieces "
                f"for {self.kind} attention over {n} context-parallel ranks: {length} is not "
                f"divisible by {self.count}"
            )
        size, xp = length // self.count, namespace(x)
        parts = [(slice(None),) * axis + (slice(i * size, (i + 1) * size),) for i in self._own]
        return xp.concatenate([x[part] for part in parts], axis=axis)

    def join(self, x: Array, axis: int = 1) -> Array:
        """Return the whole array, on every rank, of which each has its part; a collective."""
        n, xp = self.comm.world_size, namespace(x)
        rows = self.comm.all_gather(xp.reshape(x, (1, *x.shape)))
        found = {}
        for rank in range(n):
            pieces = self.pieces(rank)
            size = x.shape[axis] // len(pieces)
            for at, piece in enumerate(pieces):
                part = (slice(None),) * axis + (slice(at * size, (at + 1) * size),)
                found[piece] = rows[rank][part]
        return xp.concatenate([found[piece] for piece in sorted(found)], axis=axis)

    def runs(self, first: int, stop: int, length: int) -> list[slice]:
        """Return the positions in the whole sequence of a range of this rank's `length` ones."""
        pieces = self._own
        size, found = length // len(pieces), []
        for at, piece in enumerate(pieces):
            lo, hi = max(first, at * size), min(stop, (at + 1) * size)
            if lo < hi:
                shift = (piece - at) * size
                found.append(slice(lo + shift, hi + shift))
        return found

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the blocks of causal attention between the pieces of two ranks.

        Each is the place of the piece of the queries, that of the keys, and whether it is one
        piece with itself, of which half is masked. What is masked as a whole is left out.
        """
        for i, own in enumerate(self.pieces(queries)):
            for j, other in enumerate(self.pieces(keys)):
                if other <= own:
                    yield i, j, other == own

    def work(self, rank: int) -> float:
        """Return the multiplications of a rank, in whole blocks of attention."""
        every = range(self.comm.world_size)
        pairs = [block for keys in every for block in self.blocks(rank, keys)]
        return sum(0.5 if diagonal else 1.0 for *_, diagonal in pairs)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.pieces(self.comm.rank)


def positions(runs: list[slice]) -> slice | np.ndarray:
    """Return an index of the positions of some runs: a slice if it is one."""
    if len(runs) == 1:
        return runs[0]
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])

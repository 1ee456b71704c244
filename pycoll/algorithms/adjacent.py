"""Adjacent fold: how a world of any size acts as one of p ranks, p a power of two, in rank order.

With e = n - p, each pair of ranks (0, 1), (2, 3), ... (2e - 2, 2e - 1) acts as one: the even rank
of a pair acts for both, the odd one is *spare*. Those who act are numbered 0..p-1 by a virtual rank
that keeps their order. Virtual rank v stands for one or two ranks, first(v) .. first(v + 1) - 1.

An algorithm that joins neighbouring intervals of virtual ranks at distance 1, 2, 4, ..., the lower
one on the left, gives the in-order balanced tree of the n inputs. The pairs cost no round of their
own: the first join, at distance 1, reads the inputs of all the two to four ranks behind two virtual
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.schedule.ir import IN, Buffer, Fold, Piece, Vector, at, fold


def power_of_two(n: int) -> int:
    """Largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def doublings(n: int) -> list[int]:
    """Powers of two below n, ascending."""
    return [1 << bit for bit in range((n - 1).bit_length())]


@dataclass(frozen=True)
class Adjacent:
    """The fold of n ranks, seen from some of them."""

    p: int  # number of virtual ranks, the largest power of two that is at most n
    pairs: int  # number of pairs, e = n - p
    virtual: Vector  # virtual rank; that of a spare rank is its partner's
    acts: Vector  # whether the rank acts for itself or for a pair
    spare: Vector  # whether it is the odd rank of a pair

    @property
    def distances(self) -> list[int]:
        """Distances 1, 2, 4, ... p / 2 between partners."""
        return doublings(self.p)

    @property
    def sizes(self) -> list[int]:
        """Numbers of ranks that occur behind two neighbouring virtual ranks."""
        return [2] * (self.p - self.pairs > 1) + [3] * (self.pairs % 2) + [4] * (self.pairs > 1)

    def first(self, virtual: Vector) -> Vector:
        """Rank that acts as a virtual rank, the first of those behind it."""
        return virtual + np.minimum(virtual, self.pairs) if self.pairs else virtual

    def join(
        self,
        distance: int,
        chunk: Vector,
        held: tuple[Buffer, Vector],
        to: Piece | list[Piece],
        *,
        count: Vector = 1,
        where: Vector = True,
    ) -> list[Fold]:
        """Combine what a virtual rank and its partner have, lower ranks on the left.

        Args:
            distance: Distance of the partner. At distance 1 the inputs are combined.
            chunk: First chunk to combine.
            held: Buffer and place in it where ranks hold their sums of these chunks.
            to: Destination.
            count: Number of chunks.
            where: Mask of the ranks that take part.
        """
        low = self.virtual & ~distance
        if distance > 1:
            sources = [at(self.first(v), *held) for v in (low, low | distance)]
            return [fold(sources, to=to, count=count, where=where)]
        first = self.first(low)
        behind = self.first(low + 2) - first
        inputs = [at(first + i, IN, chunk) for i in range(4)]
        return [
            fold(inputs[:size], to=to, count=count, where=where & (behind == size), tree=True)
            for size in self.sizes
        ]


def adjacent(rank: Vector, n: int) -> Adjacent:
    """Fold n ranks into the largest power of two."""
    p = power_of_two(n)
    pairs = n - p
    virtual = rank - np.minimum((rank + 1) // 2, pairs) if pairs else rank
    spare = (rank < 2 * pairs) & (rank % 2 == 1)
    return Adjacent(p, pairs, virtual, np.logical_not(spare), spare)

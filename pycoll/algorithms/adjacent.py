"""Adjacent fold: how a world of any size becomes one of p ranks, p a power of two, in rank order.

With e = n - p, the pairs (0, 1), (2, 3), ... (2e - 2, 2e - 1) act as one. The even rank of a pair acts,
the odd one is *spare*. Those who act are numbered 0..p-1 by a virtual rank that keeps their order, so
an algorithm on virtual ranks that combines neighbouring intervals, the lower one on the left, gives
the in-order balanced tree of the n inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Vector


class Adjacent(NamedTuple):
    """The fold of n ranks, seen from some of them.

    Attributes:
        p: Number of virtual ranks, the largest power of two that is at most n.
        pairs: Number of pairs, e = n - p.
        virtual: Virtual rank.
        acts: Whether the rank has a virtual rank of its own.
        leads: Whether it acts for a pair.
        spare: Whether it is the odd rank of a pair.
    """

    p: int
    pairs: int
    virtual: Vector
    acts: Vector
    leads: Vector
    spare: Vector

    def real(self, virtual: Vector) -> Vector:
        """Rank that acts as a virtual rank; as a chunk index, the first chunk that belongs to it."""
        return virtual + np.minimum(virtual, self.pairs) if self.pairs else virtual


def adjacent(rank: Vector, n: int) -> Adjacent:
    """Fold n ranks into the largest power of two."""
    p = 1 << (n.bit_length() - 1)
    pairs = n - p
    if not pairs:
        return Adjacent(p, 0, rank, True, False, False)
    paired = rank < 2 * pairs
    even = rank % 2 == 0
    virtual = rank - np.minimum((rank + 1) // 2, pairs)
    return Adjacent(p, pairs, virtual, even | (rank >= 2 * pairs), paired & even, paired & (rank % 2 == 1))

"""Two binary trees at once, each for half of the vector: who is inner in one is a leaf in the other.

n is the world size, m the size of the full vector, k the number of blocks of each half.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.algorithms.copies import alone
from pycoll.schedule.ir import ACC, IN, OUT, Vector, algorithm, at, fold


class Node(NamedTuple):
    """A place in the in-order binary tree over the places 0..n-1.

    Attributes:
        depth: Distance from the root, which is at place 0 and has one child.
        parent: Place of the parent, if depth > 0.
        left: Place of the child below, if has_left; its subtree lies just below the place.
        right: Place of the child above, if has_right; its subtree lies just above.
    """

    depth: Vector
    parent: Vector
    left: Vector
    right: Vector
    has_left: Vector
    has_right: Vector


def _parent(place: Vector, n: int) -> Vector:
    """Clear the lowest set bit and set the next one, unless that leaves the tree; 0 for the root."""
    low = place & -place
    up = (place ^ low) | (low << 1)
    return np.where(up < n, up, place ^ low)


def node(place: Vector, n: int) -> Node:
    """Describe places of the tree; odd places are leaves, even ones but 0 are inner or last."""
    height = (n - 1).bit_length()
    low = np.where(place == 0, 1 << height, place & -place)
    right, depth, above = place, 0 * place, place
    for bit in reversed(range(height)):
        step = 1 << bit
        fits = (step < low) & (right == place) & (place + step < n)
        right = np.where(fits, place + step, right)
        depth, above = depth + (above > 0), _parent(above, n)
    has_left = (low > 1) & (place > 0)
    return Node(depth, _parent(place, n), place - low // 2, right, has_left, right != place)


@algorithm("all_reduce", "double_tree", chunks=lambda n, k: 2 * k, k=4)
def all_reduce(rank, n, k):
    """Blocks are summed up both trees and come back down, one block behind the other.

    The second tree is the mirror image of the first if n is even, else the first one shifted by one.

    Cost: k - 1 + 2 ceil(log2 n) rounds; 2 m bytes per rank.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", Parallel Computing 35(12), 2009.
    """
    yield from alone(rank, n, 2 * k)
    height = (n - 1).bit_length()
    mirrored = n - 1 - rank if n % 2 == 0 else (rank - 1) % n
    ...

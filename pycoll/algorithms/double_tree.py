"""Two binary trees, each for half of the vector: who is inner in one is a leaf in the other.

n is the world size, m the size of the full vector, k the number of blocks of each half.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.algorithms.copies import alone
from pycoll.schedule.ir import ACC, IN, OUT, Vector, algorithm, at, fold


class Node(NamedTuple):
    """A place in the in-order binary tree over the places 0..n-1."""

    depth: Vector  # distance from the root, which is at place 0 and has one child
    parent: Vector  # place of the parent, if depth > 0
    left: Vector  # place of the child below, if has_left; its subtree lies just below the place
    right: Vector  # place of the child above, if has_right; its subtree lies just above
    has_left: Vector
    has_right: Vector


def _parent(place: Vector, n: int) -> Vector:
    """Clear the lowest set bit, then set the next one if that stays in the tree."""
    low = place & -place
    up = (place ^ low) | (low << 1)
    return np.where(up < n, up, place ^ low)


def node(place: Vector, n: int) -> Node:
    """Describe places of the tree; the odd ones are its leaves."""
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


def _tree_folds(rank, n, k, tree, step):
    """Folds of one tree in one round: block ``step - i`` is summed up, another one comes down."""
    own, real, offset = tree
    top = (n - 1).bit_length() - 1
    up = step - top + own.depth
    chunk = offset + up
    mine, to = at(rank, IN, chunk), at(rank, OUT, chunk)
    left, right = at(real(own.left), ACC, chunk), at(real(own.right), ACC, chunk)
    sums = (up >= 0) & (up < k)
    down = step - top - own.depth
    block = offset + down
    receives = (own.depth > 0) & (down >= 0) & (down < k)
    yield fold([left, mine, right], to=to, where=sums & own.has_left & own.has_right)
    yield fold([left, mine], to=to, where=sums & (own.has_left > own.has_right))
    yield fold([mine, right], to=to, where=sums & (own.has_left < own.has_right))
    yield fold(at(real(own.parent), OUT, block), to=at(rank, OUT, block), where=receives)


@algorithm("all_reduce", "double_tree", chunks=lambda n, k: 2 * k, k=4)
def all_reduce(rank, n, k):
    """Blocks are summed up both trees and come back down, one block behind the other.

    The second tree is the mirror image of the first if n is even, else the first one moved by one.

    Cost: k - 1 + 2 ceil(log2 n) rounds; at most 2 m bytes per rank.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", Parallel Computing 35(12), 2009.
    """
    yield from alone(rank, n, 2 * k)
    first = node(rank, n), lambda place: place, 0
    if n % 2 == 0:
        second = node(n - 1 - rank, n), lambda place: n - 1 - place, k
    else:
        second = node((rank - 1) % n, n), lambda place: place + 1, k
    for step in range(k - 1 + 2 * (n - 1).bit_length() if n > 1 else 0):
        yield [line for tree in (first, second) for line in _tree_folds(rank, n, k, tree, step)]

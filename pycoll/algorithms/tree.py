"""Binomial trees.

n is the world size, p the largest power of two that is at most n, m the size of the full vector.
The *place* of a rank is its distance from the root, counted upwards and around; the children of
place v are at v + 1, v + 2, v + 4, ...
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pycoll.algorithms.adjacent import adjacent, doublings
from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold


@algorithm("broadcast", "binomial", chunks=1, root=0)
def broadcast(rank, n, root):
    """In each round every rank that has the vector sends it to one that has not.

    Cost: ceil(log2 n) rounds; m bytes per rank, m ceil(log2 n) at the root.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (binomial tree).
    """
    place = (rank - root) % n
    for distance in doublings(n):
        joins = (place >= distance) & (place < 2 * distance)
        yield fold(at(rank - distance, ACC), to=at(rank, OUT), where=joins)
    yield keep(rank, where=rank == root)


@algorithm("reduce", "binomial", chunks=1, slots=lambda n, root: int(n > 3), order="tree", root=0)
def reduce(rank, n, root):
    """Neighbouring intervals of ranks are joined, lower ranks on the left; the root does the last.

    The tree hangs on the order of the ranks, not on the root.

    Cost: log2 p rounds; m log2 p bytes at the busiest rank, and at most 2 m more if n > p.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (binomial tree; here in rank order for every root).
    """
    yield from alone(rank, n)
    world = adjacent(rank, n)
    for distance in world.distances:
        if 2 * distance == world.p:
            top = replace(world, virtual=0)
            yield top.join(distance, 0, (TMP, 0), at(rank, OUT), where=rank == root)
        else:
            has = world.acts & (world.virtual % (2 * distance) == 0)
            yield world.join(distance, 0, (TMP, 0), at(rank, TMP), where=has)


def _subtree_slots(n, root):
    half = 1 << (n - 1).bit_length() >> 1  # the subtree at that place is the last one joined
    return max(n - half, half // 2) - 1 if n > 1 else 0


@algorithm("gather", "binomial", slots=_subtree_slots, root=0)
def gather(rank, n, root):
    """Every rank collects the blocks of its subtree; slot i holds the block of rank + i + 1.

    Cost: ceil(log2 n) rounds; (n - 1) / n * m bytes at the root.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (binomial tree).
    """
    place = (rank - root) % n
    for distance in doublings(n):
        child = rank + distance
        more = np.minimum(distance, n - place - distance) - 1  # blocks of the child but its own
        collects = (place % (2 * distance) == 0) & (more >= 0)
        folds = []
        for buffer, first, where in ((TMP, distance - 1, place > 0), (OUT, child, place == 0)):
            has = collects & where
            own, rest = at(rank, buffer, first), at(rank, buffer, first + 1)
            folds.append(fold(at(child, IN, child), to=own, where=has))
            if distance > 1:
                folds.append(fold(at(child, TMP), to=rest, count=more, where=has))
        yield folds
    yield keep(rank, rank, where=rank == root)


@algorithm("scatter", "binomial", slots=_subtree_slots, root=0)
def scatter(rank, n, root):
    """Every rank passes on the blocks of its subtree; slot i holds the block of rank + i + 1.

    Cost: ceil(log2 n) rounds; (n - 1) / n * m bytes at the root.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (binomial tree).
    """
    place = (rank - root) % n
    for distance in reversed(doublings(n)):
        parent = rank - distance
        more = np.minimum(distance, n - place) - 1
        joins = place % (2 * distance) == distance
        by_root, by_rank = joins & (place == distance), joins & (place > distance)
        folds = []
        for buffer, first, has in ((IN, rank, by_root), (TMP, distance - 1, by_rank)):
            own, rest = at(parent, buffer, first), at(parent, buffer, first + 1)
            folds.append(fold(own, to=at(rank, OUT, rank), where=has))
            if distance > 1:
                folds.append(fold(rest, to=at(rank, TMP), count=more, where=has))
        yield folds
    yield keep(rank, rank, where=rank == root)

"""Bine trees: binomial trees whose children are on alternating sides, so a third nearer.

A child of an even place is at distance 1, -1, 3, -5, 11, ..., of an odd one at minus that: the
partners of `pycoll.algorithms.locality.swing`. Where ranks lie in groups whose sizes are no powers
of two, fewer transfers leave a group than in a binomial tree. n is the world size, a power of two;
m the size of the full vector. The *place* of a rank is its distance from the root, around.
"""

from __future__ import annotations

import numpy as np

from pycoll.algorithms.copies import alone, keep
from pycoll.algorithms.locality.swing import distances, power_of_two
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold


def _grown(n: int) -> list[tuple[int, list[int]]]:
    """For each round of a broadcast, the distance of that round, and the places that join."""
    grown, has = [], [0]
    for d in reversed(distances(n)):
        joins = [(place - d if place % 2 else place + d) % n for place in has]
        grown.append((d, joins))
        has += joins
    return grown


@algorithm("broadcast", "bine", chunks=1, worlds=power_of_two, root=0)
def broadcast(rank, n, root):
    """In each round every rank that has the vector sends it to one that has not, from far to near.

    Cost: log2 n rounds; m bytes per rank, m log2 n at the root.
    Source: De Sensi, Pasqualoni, Piarulli, Bonato, Ba, Turisini, Domke and Hoefler, "Bine trees:
    enhancing collective operations by optimizing communication locality", SC 2025 (broadcast).
    """
    place = (rank - root) % n
    side = 1 - 2 * (place % 2)
    for d, joins in _grown(n):
        yield fold(at(rank + side * d, ACC), to=at(rank, OUT), where=np.isin(place, joins))
    yield keep(rank, where=rank == root)


def _reduce_slots(n, root):
    return int(n > 2)


@algorithm("reduce", "bine", chunks=1, slots=_reduce_slots, worlds=power_of_two, root=0)
def reduce(rank, n, root):
    """The broadcast backwards: in each round half of the ranks add a child's sum to their own.

    Cost: log2 n rounds; m bytes per rank, m log2 n at the root.
    Source: De Sensi, Pasqualoni, Piarulli, Bonato, Ba, Turisini, Domke and Hoefler, "Bine trees:
    enhancing collective operations by optimizing communication locality", SC 2025 (reduce).
    """
    yield from alone(rank, n)
    place = (rank - root) % n
    side = 1 - 2 * (place % 2)
    has, parents = [0], []
    for d, joins in _grown(n):
        parents.append((d, has))
        has = has + joins
    source = IN
    for d, adds in reversed(parents):
        to = at(rank, OUT if len(adds) == 1 else TMP)
        mine, child = at(rank, source), at(rank + side * d, source)
        yield fold([mine, child], to=to, where=np.isin(place, adds))
        source = TMP

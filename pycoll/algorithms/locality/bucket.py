"""Buckets: rings along the axes of a grid, one axis after the other.

On a torus every message then goes to a neighbour, and there are far fewer rounds than in one ring
through all ranks. n is the world size, a grid of ``axes`` axes with lengths l; m the size of the
full vector.
"""

from __future__ import annotations

from pycoll.algorithms.copies import alone
from pycoll.algorithms.locality.grid import grid
from pycoll.schedule.ir import ACC, OUT, algorithm, at, fold


def _rings(rank, n, axes):
    """For each axis: its length, the rank's place on it and left neighbour, and their buckets.

    The ranks of a ring share ``length * size`` chunks from ``first`` on; each ends with one bucket
    of ``size``, which it shares along the next axis.
    """
    size, first = n, 0
    for length in grid(n, axes):
        size //= length
        place = rank // size % length
        left = rank + ((place - 1) % length - place) * size
        yield length, place, left, first, size
        first = first + place * size


@algorithm("all_reduce", "bucket", chunks=lambda n, axes: n, axes=2)
def all_reduce(rank, n, axes):
    """Ring reduce-scatters along one axis after the other, then ring all-gathers on the way back.

    Cost: 2 sum(l - 1) rounds; 2 (n - 1) / n * m bytes per rank.
    Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
    interconnects", ICS 2010 (one of its buckets).
    """
    yield from alone(rank, n)
    rings = list(_rings(rank, n, axes))
    for length, place, left, first, size in rings:
        for step in range(length - 1):
            chunk = first + (place - step - 2) % length * size
            sources = [at(left, ACC, chunk), at(rank, ACC, chunk)]
            yield fold(sources, to=at(rank, OUT, chunk), count=size)
    for length, place, left, first, size in reversed(rings):
        for step in range(length - 1):
            chunk = first + (place - step - 1) % length * size
            yield fold(at(left, OUT, chunk), to=at(rank, OUT, chunk), count=size)

"""Pairwise exchange: in round i every rank exchanges data with the one at distance i only.

n is the world size, m the size of the full vector.
"""

from __future__ import annotations

from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import ACC, IN, OUT, algorithm, at, fold, in_turn


@algorithm("all_to_all", "pairwise", in_place=False)
def all_to_all(rank, n):
    """Every rank fetches its block from one peer after the other.

    Cost: n - 1 rounds; (n - 1) / n * m bytes per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (pairwise exchange).
    """
    yield keep(rank, rank)

    def fetch(distance):
        return fold(at(rank + distance, IN, rank), to=at(rank, OUT, rank + distance))

    yield in_turn(range(1, n), fetch)


@algorithm("reduce_scatter", "pairwise")
def reduce_scatter(rank, n):
    """Every rank adds its chunk of one peer's input after the other to its own.

    Cost: n - 1 rounds; (n - 1) / n * m bytes per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (pairwise exchange).
    """
    yield from alone(rank, n)

    def add(distance):
        both = [at(rank, ACC, rank), at(rank + distance, IN, rank)]
        return fold(both, to=at(rank, OUT, rank))

    yield in_turn(range(1, n), add)

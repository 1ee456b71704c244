"""Circulant graphs: the fewest rounds and the least volume for every world size, no powers of two.

Ranks talk to those at distance skip[0] = 1, ..., skip[q] = n, where each skip is half the next one,
rounded up, and q = ceil(log2 n). n is the world size, m the size of the full vector.
"""

from __future__ import annotations

from itertools import pairwise

from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold


def skips(n: int) -> list[int]:
    """Distances in the circulant graph, from 1 up to n."""
    found = [n]
    while found[-1] > 1:
        found.append((found[-1] + 1) // 2)
    return found[::-1]


def _halves(n: int) -> list[tuple[int, int]]:
    """Pairs of a skip and the next one, from the largest down."""
    return list(pairwise(skips(n)))[::-1]


def _sum_for(rank, ahead, summed):
    """Where a rank keeps its sum for the rank that is ``ahead`` of it."""
    return at(rank, TMP, ahead) if ahead < summed else at(rank, IN, rank + ahead)


@algorithm("reduce_scatter", "circulant", slots=lambda n: n // 2 if n > 2 else 0)
def reduce_scatter(rank, n):
    """Every rank passes on its sums for the further half of the ranks ahead of it.

    In each round the sums for rank + skip .. rank + span - 1 leave, and those that come from the
    rank at distance skip behind are added to the first span - skip. Slot i holds the sum for rank +
    i.

    Cost: ceil(log2 n) rounds; (n - 1) / n * m bytes per rank.
    Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv
    2410.14234 (reduce-scatter).
    """
    yield from alone(rank, n)
    summed = 0
    for skip, span in _halves(n):
        split = max(skip, min(span, summed))
        folds = []
        for low, high in ((skip, split), (split, span)):
            if low < high:
                both = [_sum_for(rank - skip, low, summed), _sum_for(rank, low - skip, summed)]
                to = at(rank, TMP, low - skip) if skip > 1 else at(rank, OUT, rank)
                folds.append(fold(both, to=to, count=high - low))
        yield folds
        summed = max(summed, span - skip)


@algorithm("all_reduce", "circulant")
def all_reduce(rank, n):
    """The circulant reduce-scatter with its sums in the output, then the circulant all-gather.

    Cost: 2 ceil(log2 n) rounds; 2 (n - 1) / n * m bytes per rank.
    Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv
    2410.14234 (all-reduce).
    """
    yield from alone(rank, n)
    for skip, span in _halves(n):
        both = [at(rank - skip, ACC, rank), at(rank, ACC, rank)]
        yield fold(both, to=at(rank, OUT, rank), count=span - skip)
    yield from _gather(rank, n)


def _gather(rank, n):
    for skip, span in reversed(_halves(n)):
        other = rank + skip
        yield fold(at(other, OUT, other), to=at(rank, OUT, other), count=span - skip)


@algorithm("all_gather", "circulant")
def all_gather(rank, n):
    """Every rank fetches the blocks that the rank at distance skip ahead has gathered.

    Cost: ceil(log2 n) rounds; (n - 1) / n * m bytes per rank.
    Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv
    2410.14234 (all-gather).
    """
    yield keep(rank, rank)
    yield from _gather(rank, n)

"""Circulant graphs: the fewest rounds and the least volume for every world size, no powers of two.

Ranks talk to those at distance skip[0] = 1, ..., skip[q] = n, where each skip is half the next one,
rounded up, and q = ceil(log2 n). n is the world size, m the size of the full vector.

A broadcast or a reduction moves k blocks. In round i of k - 1 + q a rank receives from the one at
distance skip[i mod q] behind it. The *receive schedule* says which block that is; it repeats every
q rounds with all block numbers q higher. Within q rounds a rank receives q different blocks, and
what a peer wants from it has come before.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import ACC, IN, OUT, TMP, Vector, algorithm, at, fold, in_turn


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


def base_block(place: Vector, n: int) -> np.ndarray:
    """First block that a rank at a distance from the root receives; q for the root.

    It is the smallest skip in the distance written greedily as a sum of skips.
    """
    skip = skips(n)
    rest = np.array(place)
    block = np.full(rest.shape, len(skip) - 1)
    for e in reversed(range(len(skip) - 1)):
        block = np.where(rest >= skip[e], e, block)
        rest = np.where(rest >= skip[e], rest - skip[e], rest)
    return block


def receive_schedule(place: Vector, n: int) -> np.ndarray:
    """Find the blocks that ranks receive in a phase of q rounds, in O(log^2 n) vector steps.

    In round j a rank at distance ``place`` from the root (counted as n + place, to allow for those
    behind the root) receives the base block of a rank x that is at least skip[j] behind it. To find
    x, walk greedily up from the root by the skips whose block is still free, never reaching the x
    of the round before, and stop once x is closer than skip[j + 1]. The block is the last skip
    used.

    Args:
        place: Distances from the root, any shape.
        n: World size.

    Returns:
        ``[q, *place.shape]`` block numbers. All but one are negative: they belong to the phase
        before. A rank's base block is the one that is not; the root receives nothing.
    """
    skip = np.array(skips(n))
    q = len(skip) - 1
    base = base_block(place, n)
    free = np.arange(q + 1).reshape(-1, *[1] * base.ndim) != base
    bound = np.full(base.shape, 2 * n)
    blocks = np.empty((q, *base.shape), np.int64)
    for j in range(q):
        nearest, next_nearest = n + place - skip[j], n + place - skip[j + 1]
        x, last = np.zeros_like(base), np.zeros_like(base)
        for e in reversed(range(q + 1)):
            go = free[e] & (x <= next_nearest) & (x + skip[e] <= nearest) & (x + skip[e] < bound)
            x, last = np.where(go, x + skip[e], x), np.where(go, e, last)
        np.put_along_axis(free, last[None], False, axis=0)
        bound = x
        blocks[j] = np.where(last == q, base, last - q)
    return blocks


@lru_cache(8)
def _all_blocks(n: int) -> np.ndarray:
    """Return ``[q * n]`` the receive schedule of all ranks, by round and distance from the root."""
    return receive_schedule(np.arange(n), n).ravel()


def _block_rounds(n: int, k: int) -> list[tuple[int, int]]:
    """List the rounds in order as (j, number to add to the block numbers of round j)."""
    q = (n - 1).bit_length()
    if not q:
        return []
    skipped = -(k - 1) % q  # so that the last round ends a phase
    return [(i % q, i - i % q - skipped) for i in range(skipped, skipped + k - 1 + q)]


@algorithm("broadcast", "circulant", chunks=lambda n, root, k: k, root=0, k=4)
def broadcast(rank, n, root, k):
    """Every rank fetches one block a round, each time from a rank that has had it before.

    Cost: k - 1 + ceil(log2 n) rounds; m bytes per rank, (k - 1 + ceil(log2 n)) / k * m at the root.
    Source: Träff, "Optimal broadcast schedules in logarithmic time with applications to broadcast,
    all-broadcast, reduction and all-reduction", arXiv 2312.11236 and 2407.18004.
    """
    place, blocks = (rank - root) % n, _all_blocks(n)
    turn, phase = np.array(_block_rounds(n, k), np.int64).reshape(-1, 2).T
    row, skip = turn * n, np.array(skips(n))[turn]

    def fetch(step):
        block = np.minimum(blocks[row[step] + place] + phase[step], k - 1)
        source = at(rank - skip[step], ACC, block)
        return fold(source, to=at(rank, OUT, block), where=block >= 0)

    yield in_turn(range(len(turn)), fetch, during=(0, len(turn) * (place > 0)))
    yield keep(rank, count=k, where=rank == root)


@algorithm(
    "reduce",
    "circulant",
    chunks=lambda n, root, k: k,
    slots=lambda n, root, k: k if n > 1 else 0,
    root=0,
    k=4,
)
def reduce(rank, n, root, k):
    """The broadcast run backwards: where a rank sent a block, it adds one that comes back.

    Cost: k - 1 + ceil(log2 n) rounds; m bytes per rank, (k - 1 + ceil(log2 n)) / k * m at the root.
    Source: Träff, "Optimal broadcast schedules in logarithmic time with applications to broadcast,
    all-broadcast, reduction and all-reduction", arXiv 2312.11236 and 2407.18004.
    """
    yield from alone(rank, n, k)
    skip = np.array(skips(n))
    ahead = np.add.outer(skip[:-1], (rank - root) % n) % n  # who receives from a rank in round j
    blocks = receive_schedule(ahead, n)
    others, is_root = rank != root, rank == root
    if n > 1:
        yield fold(at(rank, IN), to=at(rank, TMP), count=k, where=others)
    for j, phase in reversed(_block_rounds(n, k)):
        block = np.minimum(blocks[j, j] + phase, k - 1)
        busy = (ahead[j] > 0) & (block >= 0)
        theirs, mine, result = (
            at(rank + skip[j], TMP, block),
            at(rank, TMP, block),
            at(rank, OUT, block),
        )
        yield [
            fold([theirs, mine], to=mine, where=busy & others),
            fold([theirs, at(rank, ACC, block)], to=result, where=busy & is_root),
        ]

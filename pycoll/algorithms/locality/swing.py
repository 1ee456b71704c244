"""Swing: partners on alternating sides, at distances 1, 1, 3, 5, 11, ... instead of 1, 2, 4, 8, ...

On rings and tori each round then crosses fewer links than with powers of two. Even ranks go to one
side, odd ones to the other. On a grid of several axes, rounds go along one axis after the other. n
is the world size, a power of two; m the size of the full vector.
"""

from __future__ import annotations

import numpy as np

from pycoll.algorithms.copies import alone
from pycoll.algorithms.locality.grid import grid
from pycoll.schedule.ir import ACC, IN, OUT, algorithm, at, fold


def distances(n: int) -> list[int]:
    """Distance of the partner in each round, to the right for even ranks: 1, -1, 3, -5, 11, ..."""
    return [(1 - (-2) ** (step + 1)) // 3 for step in range(n.bit_length() - 1)]


def power_of_two(n: int) -> bool:
    """Whether a world has the size that these need."""
    return n & (n - 1) == 0


def partners(n: int, axes: int = 1) -> list[np.ndarray]:
    """For each round, the partner of each rank, ``[n]``."""
    lengths, found = grid(n, axes), []
    place = np.unravel_index(np.arange(n), lengths)
    for step in range(max(lengths).bit_length() - 1):
        for axis, length in enumerate(lengths):
            if step < len(distances(length)):
                own, there = place[axis], list(place)
                there[axis] = (own + (1 - 2 * (own % 2)) * distances(length)[step]) % length
                found.append(np.ravel_multi_index(there, lengths))
    return found


def chunks_of(rounds: list[np.ndarray], n: int) -> np.ndarray:
    """``[n]`` number a chunk for each rank, so that those a rank reaches from a round on are a run.

    Who a rank reaches from a round on, its partner of that round does, too. So these sets nest, and
    each is numbered as one half, then the other, that with the lowest rank first.
    """
    chunk, lowest = np.zeros(n, np.int64), np.arange(n)
    for size, partner in enumerate(reversed(rounds)):
        chunk += (lowest > lowest[partner]).astype(np.int64) << size
        lowest = np.minimum(lowest, lowest[partner])
    return chunk


def _ranges(rounds: list[np.ndarray], n: int):
    """For each round: partners, the first chunk that each rank reaches afterwards, how many."""
    chunk = chunks_of(rounds, n)
    for step, partner in enumerate(rounds):
        half = n >> (step + 1)
        yield partner, chunk & -half, half


@algorithm("all_reduce", "swing", chunks=lambda n, axes: n, worlds=power_of_two, axes=1)
def all_reduce(rank, n, axes):
    """Halve what is summed with each partner until one chunk is left; then go back.

    Cost: 2 log2 n rounds; 2 (n - 1) / n * m bytes per rank.
    Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
    allreduce", NSDI 2024 (bandwidth-optimal).
    """
    yield from alone(rank, n)
    ranges = list(_ranges(partners(n, axes), n))
    for partner, low, half in ranges:
        mine, theirs = (at(r, ACC, low[rank]) for r in (rank, partner[rank]))
        yield fold([theirs, mine], to=at(rank, OUT, low[rank]), count=half)
    for partner, low, half in reversed(ranges):
        there = partner[rank]
        yield fold(at(there, OUT, low[there]), to=at(rank, OUT, low[there]), count=half)


@algorithm("all_gather", "swing", chunks=lambda n, axes: n, worlds=power_of_two, axes=1)
def all_gather(rank, n, axes):
    """The second half of the all-reduce.

    Cost: log2 n rounds; (n - 1) / n * m bytes per rank.
    Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
    allreduce", NSDI 2024 (all-gather).
    """
    yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))
    rounds = partners(n, axes)
    owner = np.argsort(chunks_of(rounds, n))
    for partner, low, half in reversed(list(_ranges(rounds, n))):
        there = partner[rank]
        blocks = [owner[low[there] + i] for i in range(half)]
        yield [fold(at(there, OUT, block), to=at(rank, OUT, block)) for block in blocks]

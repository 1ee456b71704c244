"""Swing: partners on alternating sides, at distances 1, 1, 3, 5, 11, ... instead of 1, 2, 4, 8, ...

On rings and tori each round then crosses fewer links than with powers of two. Even ranks go to one
side, odd ones to the other, so partners are neighbours in parity, and what holds for an even rank
holds for an odd one mirrored. n is the world size, a power of two; m the size of the full vector.
"""

from __future__ import annotations

from pycoll.algorithms.copies import alone
from pycoll.schedule.ir import ACC, IN, OUT, algorithm, at, fold


def distances(n: int) -> list[int]:
    """Distance of the partner in each round, to the right for even ranks: 1, -1, 3, -5, 11, ..."""
    return [(1 - (-2) ** (step + 1)) // 3 for step in range(n.bit_length() - 1)]


def reached(n: int) -> list[list[int]]:
    """For each round, whom an even rank reaches in the rounds after it, as distances from itself.

    A partner at distance d reaches mirrored: what is at x from an even rank is at -x from an odd
    one, so at d - x from the even rank whose partner it is.
    """
    found = [[0]]
    for d in reversed(distances(n)):
        found.append(found[-1] + [(d - x) % n for x in found[-1]])
    return found[-2::-1]


def power_of_two(n: int) -> bool:
    """Whether a world has the size that these need."""
    return n & (n - 1) == 0


def _rounds(rank, n):
    """Yield for each round the side of a rank, its partner, and whom it reaches afterwards."""
    side = 1 - 2 * (rank % 2)
    for d, ahead in zip(distances(n), reached(n), strict=True):
        yield side, rank + side * d, ahead


def _halvings(rank, n):
    """Rounds in which a rank adds its partner's sums for whom it still reaches to its own."""
    for side, partner, ahead in _rounds(rank, n):
        blocks = [rank + side * x for x in ahead]
        yield [fold([at(partner, ACC, b), at(rank, ACC, b)], to=at(rank, OUT, b)) for b in blocks]


def _doublings(rank, n):
    """The same rounds backwards: a rank copies what its partner has collected."""
    for side, partner, ahead in reversed(list(_rounds(rank, n))):
        blocks = [partner - side * x for x in ahead]
        yield [fold(at(partner, OUT, b), to=at(rank, OUT, b)) for b in blocks]


@algorithm("all_reduce", "swing", worlds=power_of_two)
def all_reduce(rank, n):
    """Halve what is summed with each partner until one chunk is left; then go back.

    Cost: 2 log2 n rounds; 2 (n - 1) / n * m bytes per rank.
    Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
    allreduce", NSDI 2024 (bandwidth-optimal).
    """
    yield from alone(rank, n)
    yield from _halvings(rank, n)
    yield from _doublings(rank, n)


@algorithm("all_gather", "swing", worlds=power_of_two)
def all_gather(rank, n):
    """The second half of the all-reduce.

    Cost: log2 n rounds; (n - 1) / n * m bytes per rank.
    Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
    allreduce", NSDI 2024 (all-gather).
    """
    yield fold(at(rank, IN, rank), to=at(rank, OUT, rank))
    yield from _doublings(rank, n)

"""Bruck's algorithms: distances 1, 2, 4, ... around the ring of ranks, for every world size.

n is the world size, m the size of the full vector. Chunks are counted around the ring too, so
nothing has to be rotated before or after.
"""

from __future__ import annotations

from pycoll.algorithms.adjacent import doublings
from pycoll.algorithms.copies import keep
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold


@algorithm("all_gather", "bruck")
def all_gather(rank, n):
    """Every rank fetches what the rank at that distance ahead has; the distance doubles.

    Cost: ceil(log2 n) rounds; (n - 1) / n * m bytes per rank.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE TPDS 8(11), 1997 (concatenation).
    """
    yield keep(rank, rank)
    for distance in doublings(n):
        other = rank + distance
        count = min(distance, n - distance)
        yield fold(at(other, OUT, other), to=at(rank, OUT, other), count=count)


def _slot_table(n: int) -> dict[tuple[int, int], int]:
    """Number the slots: those of a block on its way i ranks ahead, before and after each hop.

    A block makes one hop for each set bit of i. It needs a slot between two hops; because the next
    one arrives in the same round as it leaves, its slots alternate.
    """
    pairs = ((i, hop) for i in range(n) for hop in range(min(2, i.bit_count() - 1)))
    return {pair: number for number, pair in enumerate(pairs)}


@algorithm("all_to_all", "bruck", slots=lambda n: len(_slot_table(n)), in_place=False)
def all_to_all(rank, n):
    """A block that has i ranks to go moves on by the powers of two that i is made of.

    Cost: ceil(log2 n) rounds; at most m ceil(log2 n) / 2 bytes per rank.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE TPDS 8(11), 1997 (index operation).
    """
    slots = _slot_table(n)
    yield keep(rank, rank)
    for distance in doublings(n):
        sender = rank - distance
        folds = []
        for i in (i for i in range(n) if i & distance):
            hops = (i & (distance - 1)).bit_count()  # made before this one
            starts, ends = hops == 0, hops == i.bit_count() - 1
            source = (
                at(sender, IN, sender + i) if starts else at(sender, TMP, slots[i, (hops - 1) % 2])
            )
            to = at(rank, OUT, rank - i) if ends else at(rank, TMP, slots[i, hops % 2])
            folds.append(fold(source, to=to))
        yield folds

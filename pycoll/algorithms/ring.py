"""Rings and chains: every rank talks to its two neighbours only.

n is the world size, m the size of the full vector, k the number of blocks it is cut into.
"""

from __future__ import annotations

from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold, in_turn


@algorithm("reduce_scatter", "ring", slots=lambda n: min(2, max(n - 2, 0)))
def reduce_scatter(rank, n):
    """Each partial sum walks the ring once and ends at its owner.

    Cost: n - 1 rounds; (n - 1) / n * m bytes per rank.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009 (logical ring).
    """
    yield from alone(rank, n)
    left = rank - 1

    def add(step, partial, to):
        return fold([partial, at(rank, IN, rank - step - 2)], to=to)

    def pass_on(step):
        return add(step, at(left, TMP, (step - 1) % 2), at(rank, TMP, step % 2))

    if n > 2:
        yield add(0, at(left, IN, rank - 2), at(rank, TMP))
    yield in_turn(range(1, n - 2), pass_on)
    last = at(left, TMP, (n - 3) % 2) if n > 2 else at(left, IN, rank)
    if n > 1:
        yield add(n - 2, last, at(rank, OUT, rank))


@algorithm("all_gather", "ring")
def all_gather(rank, n):
    """Each block walks the ring once and leaves a copy everywhere.

    Cost: n - 1 rounds; (n - 1) / n * m bytes per rank.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009 (logical ring).
    """
    left = rank - 1

    def pass_on(step):
        return fold(at(left, ACC, left - step), to=at(rank, OUT, left - step))

    yield in_turn(range(n - 1), pass_on)
    yield keep(rank, rank)


@algorithm("all_reduce", "ring")
def all_reduce(rank, n):
    """A ring reduce-scatter that leaves its sums in the output, then a ring all-gather.

    Cost: 2 (n - 1) rounds; 2 (n - 1) / n * m bytes per rank.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2), 2009 (logical ring).
    """
    yield from alone(rank, n)
    left = rank - 1

    def add(step):
        chunk = left - step - 1
        return fold([at(left, ACC, chunk), at(rank, IN, chunk)], to=at(rank, OUT, chunk))

    def pass_on(step):
        return fold(at(left, OUT, left - step), to=at(rank, OUT, left - step))

    yield in_turn(range(n - 1), add)
    yield in_turn(range(n - 1), pass_on)


@algorithm("broadcast", "ring", chunks=lambda n, root, k: k, root=0, k=4)
def broadcast(rank, n, root, k):
    """The blocks follow each other down a chain that starts at the root.

    Cost: n - 2 + k rounds; m bytes per rank.
    Source: Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
    Processing Letters 5(2), 1995 (one dimension).
    """
    place = (rank - root) % n
    left = rank - 1
    for step in range(n - 2 + k):
        block = step + 1 - place
        busy = (place > 0) & (block >= 0) & (block < k)
        yield fold(at(left, ACC, block), to=at(rank, OUT, block), where=busy)
    yield keep(rank, count=k, where=rank == root)


def _chain_slots(n, root, k):
    return min(2, k) if n > 2 else 0


@algorithm("reduce", "ring", chunks=lambda n, root, k: k, slots=_chain_slots, root=0, k=4)
def reduce(rank, n, root, k):
    """The partial sums follow each other down a chain that starts after the root and ends at it.

    Cost: n - 2 + k rounds; m bytes per rank.
    Source: Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
    Processing Letters 5(2), 1995 (one dimension, run backwards).
    """
    yield from alone(rank, n, k)
    place = (rank - root - 1) % n
    left = rank - 1
    first, inner, last = place == 1, (place > 1) & (place < n - 1), place == n - 1
    for step in range(n - 2 + k if n > 1 else 0):
        block = step + 1 - place
        busy = (block >= 0) & (block < k)
        slot = block % 2
        mine, result = at(rank, IN, block), at(rank, OUT, block)
        start, partial, to = at(left, IN, block), at(left, TMP, slot), at(rank, TMP, slot)
        if n == 2:
            yield fold([start, mine], to=result, where=busy & first)
            continue
        yield [
            fold([start, mine], to=to, where=busy & first),
            fold([partial, mine], to=to, where=busy & inner),
            fold([partial, mine], to=result, where=busy & last),
        ]

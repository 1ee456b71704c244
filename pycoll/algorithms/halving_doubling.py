"""Recursive halving and doubling: partners at distance 1, 2, 4, ... in virtual ranks.

Going from near to far, with the lower interval of ranks always on the left, every chunk is combined
along one and the same in-order tree. World sizes that are not powers of two take no round more; see
`pycoll.algorithms.adjacent`. n is the world size, p the largest power of two that is at most n, m
the size of the full vector.
"""

from __future__ import annotations

from pycoll.algorithms.adjacent import adjacent, power_of_two
from pycoll.algorithms.copies import alone, keep
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold


@algorithm("all_reduce", "halving_doubling", chunks=power_of_two, order="tree")
def all_reduce(rank, n):
    """Partners share their range of chunks, half each, until one chunk is left; then they go back.

    Cost: 2 log2 p rounds; 2 (p - 1) / p * m bytes per rank, and at most m more if n > p.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; here with
    the distance doubling in the reduce-scatter, so that the order is that of the ranks.
    """
    yield from alone(rank, n)
    world = adjacent(rank, n)
    me, low, half = world.virtual, 0, world.p
    for distance in world.distances:
        half //= 2
        low = low + half * (me & distance != 0)
        mine = at(rank, OUT, low)
        yield world.join(distance, low, (OUT, low), to=mine, count=half, where=world.acts)
    for distance in reversed(world.distances):
        other = low ^ half
        partner = at(world.first(me ^ distance), OUT, other)
        takes_part = world.acts if distance > 1 else True
        folds = [fold(partner, to=at(rank, OUT, other), count=half, where=takes_part)]
        if distance == 1 and world.pairs:
            own = at(world.first(me), OUT, low)
            folds.append(fold(own, to=at(rank, OUT, low), count=half, where=world.spare))
        yield folds
        low, half = low & ~half, 2 * half


def _halving_slots(n):
    world = adjacent(0, n)
    return world.first(world.p // 2) if world.p > 2 else 0


@algorithm("reduce_scatter", "halving", slots=_halving_slots, order="tree")
def reduce_scatter(rank, n):
    """Partners share their range of chunks, half each; the last halving stores at the owners.

    The chunks that end on a virtual rank are those behind position b, its bits in reverse.

    Cost: log2 p rounds; at most m bytes per rank, and at most 2 m more if n > p.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 (first
    phase); here with the distance doubling, so that the order is that of the ranks.
    """
    yield from alone(rank, n)
    world = adjacent(rank, n)
    me, low, half = world.virtual, 0, world.p
    base = world.first(half // 2) * (me % 2)
    for distance in world.distances:
        half //= 2
        low = low + half * (me & distance != 0)
        chunk = world.first(low)
        count = world.first(low + half) - chunk
        slot = chunk - base
        if half > 1:
            mine = at(rank, TMP, slot)
            yield world.join(distance, chunk, (TMP, slot), mine, count=count, where=world.acts)
            continue
        folds = []
        for i in range(1 + (world.pairs > 0)):
            owner, has = at(chunk + i, OUT, chunk + i), world.acts & (i < count)
            folds += world.join(distance, chunk + i, (TMP, slot + i), owner, where=has)
        yield folds


@algorithm("all_gather", "doubling")
def all_gather(rank, n):
    """Partners exchange all the blocks they have, from near to far.

    Cost: log2 p rounds; (n - 1) / n * m bytes per rank, and at most 2 m more if n > p.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (recursive doubling).
    """
    world = adjacent(rank, n)
    me = world.virtual
    yield keep(rank, rank, where=world.acts if world.p > 2 else True)
    for distance in world.distances:
        last = 2 * distance == world.p
        takes_part = True if last else world.acts
        folds = []
        if distance == 1:
            low, high = world.first(me & ~1), world.first((me | 1) + 1)
            for block in (low + i for i in range(max(world.sizes))):
                needed = takes_part & (block < high) & (block != rank)
                folds.append(fold(at(block, IN, block), to=at(rank, OUT, block), where=needed))
        else:
            sources = [(me ^ distance, takes_part), (me, world.spare)]
            for v, needed in sources[: 1 + (last and world.pairs > 0)]:
                low, high = world.first(v & -distance), world.first((v & -distance) + distance)
                block = at(world.first(v), OUT, low)
                folds.append(fold(block, to=at(rank, OUT, low), count=high - low, where=needed))
        yield folds


@algorithm(
    "all_reduce", "recursive_doubling", chunks=1, order="tree", slots=lambda n: (n > 1) + (n >= 8)
)
def recursive_doubling(rank, n):
    """Partners exchange their whole partial results and both combine them, lower ranks on the left.

    The partial results alternate between two slots, because a partner reads one while the owner
    writes the next. In the last round the spare ranks do the same as those that act for them.

    Cost: log2 p rounds; m log2 p bytes per rank, and at most 2 m more if n > p.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (recursive doubling, in rank order).
    """
    yield from alone(rank, n)
    world = adjacent(rank, n)
    for step, distance in enumerate(world.distances):
        last = 2 * distance == world.p
        to = at(rank, OUT) if last and step > 0 else at(rank, TMP, step % 2)
        takes_part = True if last else world.acts
        yield world.join(distance, 0, (TMP, (step - 1) % 2), to, where=takes_part)
    if world.p == 2:
        yield fold(at(rank, TMP), to=at(rank, OUT))

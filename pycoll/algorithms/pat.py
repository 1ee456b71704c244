"""PAT: parallel aggregated trees, with logarithmically much memory for partial results.

Each block has a binomial tree of its own: the rank x ahead of its owner has its parent at x minus
the lowest bit of x. In a turn, a rank serves one place x of each of ``trees`` parts of all trees,
so a message holds at most so many blocks, and goes to one peer. With few trees at a time a rank
keeps few partial sums; with as many as there are blocks it takes the fewest rounds.

n is the world size, p the smallest power of two that is at least n, t the number of trees, a power
of two; m the size of the full vector.
"""

from __future__ import annotations

from pycoll.algorithms.copies import keep
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold, together


def _part(n: int, trees: int) -> int:
    """Return how many places a part of a tree has."""
    p = 1 << (n - 1).bit_length()
    if trees < 1 or trees & (trees - 1):
        raise ScheduleError(f"trees={trees}; expected a power of two")
    return max(1, p // trees)


def _turns(n: int, trees: int) -> list[tuple[int, range]]:
    """List the places of each turn, parents first, and how far ahead of its parent each is."""
    part, distance = _part(n, trees), 1 << (n - 1).bit_length()
    turns = []
    while distance > part:
        distance //= 2
        turns.append((distance, range(distance, n, 2 * distance)))
    return turns + [(place & -place, range(place, n, part)) for place in range(1, min(part, n))]


@algorithm("all_gather", "pat", chunks=lambda n, trees: n, trees=1)
def all_gather(rank, n, trees):
    """Blocks go down their trees, far ahead first.

    With t trees at a time there are log2 t + p / t - 1 rounds, and t blocks at most in a message.

    Cost: n - 1 rounds; (n - 1) / n * m bytes per rank.
    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
    arXiv:2506.20252, 2025.
    """
    for distance, places in _turns(n, trees):
        parent = rank - distance

        def fetch(place, parent=parent):
            return fold(at(parent, ACC, rank - place), to=at(rank, OUT, rank - place))

        yield together(places, fetch)
    yield keep(rank, rank)


def _slot(n: int, place: int, trees: int) -> int:
    """Return where a rank keeps the partial sum of a place: one for each level of each part."""
    part = _part(n, trees)
    number, inside = divmod(place, part)
    levels = max(0, part.bit_length() - 2)  # leaves need none
    if inside:
        return number * levels + (inside & -inside).bit_length() - 2
    return trees * levels + number - 1


def _slots(n: int, trees: int) -> int:
    inner = [place for _, places in _turns(n, trees) for place in places if _children(n, place)]
    return max((_slot(n, place, trees) + 1 for place in inner), default=0)


def _children(n: int, place: int) -> list[int]:
    """Return how far ahead of a place its children are."""
    most = place & -place or n
    return [1 << i for i in range(n.bit_length()) if 1 << i < most and place + (1 << i) < n]


@algorithm("reduce_scatter", "pat", chunks=lambda n, trees: n, slots=_slots, trees=1)
def reduce_scatter(rank, n, trees):
    """Partial sums come up the trees, near ones first; a rank adds those of all children at once.

    With t trees at a time there are log2 t + p / (2 t) rounds.

    Cost: ceil((n - 1) / 2) rounds; (n - 1) / n * m bytes per rank.
    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
    arXiv:2506.20252, 2025.
    """

    def add(place):
        block, sources = rank - place, [at(rank, IN, rank - place)]
        for ahead in _children(n, place):
            inner = _children(n, place + ahead)
            partial = (TMP, _slot(n, place + ahead, trees)) if inner else (IN, block)
            sources.append(at(rank + ahead, *partial))
        to = at(rank, TMP, _slot(n, place, trees)) if place else at(rank, OUT, block)
        return fold(sources, to=to)

    for _, places in reversed(_turns(n, trees)):
        if inner := [add(place) for place in places if _children(n, place)]:
            yield inner
    yield add(0)

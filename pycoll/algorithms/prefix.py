"""Prefix reductions: rank r gets what the ranks up to itself, or below itself, contribute.

n is the world size, m the size of the vector, k the number of blocks it is cut into.
"""

from __future__ import annotations

from pycoll.algorithms.adjacent import doublings, power_of_two
from pycoll.algorithms.copies import keep
from pycoll.algorithms.direct import everywhere, in_both_orders
from pycoll.schedule.ir import ACC, IN, OUT, TMP, algorithm, at, fold, in_turn


def _direct(rank, last, n, tree):
    """Folds in which rank r combines the inputs of ranks 0 to ``last(r)``, if that is a rank."""
    inputs = everywhere(n, IN)
    return [
        fold(inputs[: last(owner) + 1], to=at(rank, OUT), tree=tree, where=rank == owner)
        for owner in range(n)
        if last(owner) >= 0
    ]


@in_both_orders("scan", "direct", chunks=1, in_place=False, in_place_staged=True)
def scan(rank, n, *, tree):
    """Every rank folds the inputs of all ranks up to itself.

    Cost: 1 round; m bytes per rank, (n - 1) * m at the last rank.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29(12), 1986 (definition).
    """
    yield _direct(rank, lambda owner: owner, n, tree)


@in_both_orders("exscan", "direct", chunks=1, in_place=False)
def exscan(rank, n, *, tree):
    """Every rank but the first folds the inputs of all ranks below itself.

    Cost: 1 round; m bytes per rank, (n - 1) * m at the last rank.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29(12), 1986 (definition).
    """
    if n > 1:
        yield _direct(rank, lambda owner: owner - 1, n, tree)


@algorithm("scan", "chain", order="rank", chunks=lambda n, k: k, k=4)
def scan_chain(rank, n, k):
    """The results follow each other down a chain, block by block; each rank adds its own part.

    Cost: n - 2 + k rounds; m bytes per rank.
    Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI 2006
    (linear pipeline).
    """

    def add(step):
        block = step + 1 - rank
        return fold([at(rank - 1, ACC, block), at(rank, IN, block)], to=at(rank, OUT, block))

    first = rank - 1
    yield in_turn(range(n - 2 + k if n > 1 else 0), add, during=(first, first + k * (rank > 0)))
    yield keep(rank, count=k, where=rank == 0)


@algorithm(
    "exscan",
    "chain",
    order="rank",
    chunks=lambda n, k: k,
    in_place=False,
    k=4,
)
def exscan_chain(rank, n, k):
    """The results follow each other down a chain; each rank adds its part for the next one.

    Cost: n - 2 + k rounds; m bytes per rank.
    Source: Sanders and Träff, "Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI 2006
    (linear pipeline).
    """

    def add(step):
        block = step - rank
        mine, to = at(rank, IN, block), at(rank + 1, OUT, block)
        return [
            fold(mine, to=to, where=rank == 0),
            fold([at(rank, OUT, block), mine], to=to, where=rank > 0),
        ]

    steps = range(n - 2 + k if n > 1 else 0)
    yield in_turn(steps, add, during=(rank, rank + k * (rank < n - 1)))


_FIRST = 2
"""Slot of what a rank has of its result after round 0; the slots below it hold windows, in turn."""


def _doubling(rank, inputs, most):
    """Folds along the in-order tree of the first ``inputs`` ranks, for each number up to ``most``.

    A *window* of d ranks is the balanced tree of their inputs; the last of them holds it, and makes
    it of two that are half as large. The tree of p + e inputs, p a power of two and e < p, has e
    pairs before p - e single inputs. Level by level the part at the border between these gets its
    neighbour, which is always a window: of 2 d ranks before it, or of d ranks behind it.
    """
    distances = doublings(power_of_two(most)) if most else []
    p = 1 + sum((inputs >= 2 * d) * d for d in distances)
    e = inputs - p
    for step, d in enumerate(distances):
        border = e & -d
        held = (TMP, step % 2) if step else (IN, 0)
        mine = [at(2 * e, IN), at(rank, TMP, _FIRST), at(rank, OUT)][min(step, 2)]
        to = at(rank, OUT) if step else at(rank, TMP, _FIRST)  # others read inputs in round 0
        before = [at(2 * border - d - 1, *held), at(2 * border - 1, *held), mine]
        behind = [mine, at(border + e + 2 * d - 1, *held)]
        folds = [
            fold(before, to=to, tree=True, where=(inputs >= 2 * d) & (e & d > 0)),
            fold(behind, to=to, where=(inputs >= 2 * d) & (e & d == 0)),
        ]
        if 2 * d <= distances[-1]:
            halves = [at(rank - d, *held), at(rank, *held)]
            ends_here = (rank >= 2 * d - 1) & (rank < most)
            folds.append(fold(halves, to=at(rank, TMP, (step + 1) % 2), where=ends_here))
        yield folds
    few = (rank > 0) & (0 < inputs) & (inputs < 4)
    yield fold(at(rank, TMP, _FIRST), to=at(rank, OUT), where=few)


def _doubling_slots(n):
    return 3 if n > 1 else 0


@algorithm("scan", "doubling", chunks=1, slots=_doubling_slots, order="tree")
def scan_doubling(rank, n):
    """Every rank makes sums of 2, 4, 8, ... inputs that end at its own, and joins those of others.

    A rank fetches at most 3 m log2 p bytes; the busiest sends some n / 2 * m, to many ranks.

    Cost: max(1, ceil(log2((n + 1) / 3))) rounds; at most n * m bytes at the busiest rank.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29(12), 1986 (partial sums of all
    intervals; here joined along the in-order tree of each number of ranks).
    """
    if n > 1:
        yield from _doubling(rank, rank + 1, n)
    yield keep(rank, where=rank == 0)


@algorithm("exscan", "doubling", chunks=1, slots=_doubling_slots, order="tree")
def exscan_doubling(rank, n):
    """Every rank makes sums of 2, 4, 8, ... inputs, and joins those of the ranks below itself.

    A rank fetches at most 3 m log2 p bytes; the busiest sends some n / 2 * m, to many ranks.

    Cost: ceil(log2 n) rounds; at most n * m bytes at the busiest rank.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29(12), 1986 (partial sums of all
    intervals; here joined along the in-order tree of each number of ranks).
    """
    if n > 1:
        yield fold(at(0, IN), to=at(rank, TMP, _FIRST), where=rank == 1)
        yield from _doubling(rank, rank, n - 1)

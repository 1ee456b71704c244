"""Prefix reductions: rank r gets what the ranks up to itself, or below itself, contribute.

n is the world size, m the size of the vector, k the number of blocks it is cut into.
"""

from __future__ import annotations

from pycoll.algorithms.copies import keep
from pycoll.algorithms.direct import in_both_orders
from pycoll.schedule.ir import ACC, IN, OUT, algorithm, at, fold, in_turn


def _direct(rank, last, n, tree):
    """Folds in which rank r combines the inputs of ranks 0 to ``last(r)``, if that is a rank."""
    return [
        fold(
            [at(peer, IN) for peer in range(last(owner) + 1)],
            to=at(rank, OUT),
            tree=tree,
            where=rank == owner,
        )
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

"""Direct algorithms: every rank reads from, or writes to, all the others at once.

Each reduction comes twice: its sources combined along the in-order tree, and, under the name with
``_rank`` added, from rank 0 upwards as a serial loop would. m is the size of the full vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from pycoll.algorithms.copies import keep
from pycoll.schedule.ir import (
    IN,
    OUT,
    TMP,
    Algorithm,
    Buffer,
    Piece,
    Vector,
    algorithm,
    at,
    fold,
    together,
)

BLOCKS = 2
"""Blocks of a vector that one rank lays out while others fetch those before."""


def in_both_orders(
    collective: str, name: str, **options: Any
) -> Callable[..., tuple[Algorithm, Algorithm]]:
    """Make two algorithms of a generator with ``tree=``: in tree order and in rank order."""

    def variant(rounds: Callable[..., Any], name: str, order: str) -> Algorithm:
        fixed = update_wrapper(partial(rounds, tree=order == "tree"), rounds)
        return algorithm(collective, name, order=order, **options)(fixed)

    def decorate(rounds: Callable[..., Any]) -> tuple[Algorithm, Algorithm]:
        return variant(rounds, name, "tree"), variant(rounds, name + "_rank", "rank")

    return decorate


def everywhere(n: int, buffer: Buffer, chunk: Vector = 0) -> list[Piece]:
    """One piece on each rank, in rank order."""
    return [at(peer, buffer, chunk) for peer in range(n)]


@in_both_orders("all_reduce", "one_shot", chunks=1, in_place=False, in_place_staged=True)
def one_shot(rank, n, *, tree):
    """Every rank folds all inputs for itself.

    Cost: 1 round; (n - 1) * m bytes per rank.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    yield fold(everywhere(n, IN), to=at(rank, OUT), tree=tree)


@in_both_orders("all_reduce", "two_shot_push")
def two_shot_push(rank, n, *, tree):
    """Every rank folds its chunk of all inputs and stores the result in all outputs.

    Cost: 1 round; (n - 1) / n * m bytes read and as many written per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (reduce-scatter, then all-gather).
    """
    yield fold(everywhere(n, IN, rank), to=everywhere(n, OUT, rank), tree=tree)


@in_both_orders("all_reduce", "two_shot_pull")
def two_shot_pull(rank, n, *, tree):
    """Every rank folds its chunk of all inputs, then fetches the other chunks.

    Cost: 2 rounds; 2 (n - 1) / n * m bytes per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (reduce-scatter, then all-gather).
    """
    yield fold(everywhere(n, IN, rank), to=at(rank, OUT, rank), tree=tree)

    def fetch(step):
        return fold(at(rank + step, OUT, rank + step), to=at(rank, OUT, rank + step))

    yield together(range(1, n), fetch)


@in_both_orders("reduce_scatter", "direct")
def reduce_scatter(rank, n, *, tree):
    """Every rank folds its chunk of all inputs.

    Cost: 1 round; (n - 1) / n * m bytes per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (pairwise exchange, all rounds at once).
    """
    yield fold(everywhere(n, IN, rank), to=at(rank, OUT, rank), tree=tree)


@in_both_orders("reduce", "direct", chunks=1, root=0)
def reduce(rank, n, root, *, tree):
    """The root folds all inputs.

    Cost: 1 round; (n - 1) * m bytes at the root.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    yield fold(everywhere(n, IN), to=at(rank, OUT), tree=tree, where=rank == root)


@in_both_orders("reduce", "two_shot_push", root=0)
def reduce_push(rank, n, root, *, tree):
    """Every rank folds its chunk of all inputs and stores the result in the root's output.

    Cost: 1 round; 2 (n - 1) / n * m bytes at the root.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (reduce-scatter, then gather).
    """
    yield fold(everywhere(n, IN, rank), to=at(root, OUT, rank), tree=tree)


@algorithm("all_gather", "direct_pull")
def all_gather_pull(rank, n):
    """Every rank fetches the blocks of all the others.

    Cost: 1 round; (n - 1) / n * m bytes per rank.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """

    def fetch(step):
        return fold(at(rank + step, IN, rank + step), to=at(rank, OUT, rank + step))

    yield together(range(1, n), fetch)
    yield keep(rank, rank)


@algorithm("all_gather", "direct_push")
def all_gather_push(rank, n):
    """Every rank stores its block in all outputs.

    Cost: 1 round; (n - 1) / n * m bytes per rank.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    yield fold(at(rank, IN, rank), to=everywhere(n, OUT, rank))


@algorithm("broadcast", "direct", chunks=1, root=0)
def broadcast(rank, n, root):
    """Every rank fetches the root's vector.

    Cost: 1 round; m bytes per rank, (n - 1) * m at the root.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    if n > 1:
        yield fold(at(root, IN), to=at(rank, OUT), where=rank != root)
    yield keep(rank, where=rank == root)


@algorithm("broadcast", "push_pull", root=0)
def broadcast_push_pull(rank, n, root):
    """The root stores one chunk in all outputs while every other rank fetches the other chunks.

    So the root copies no less than the others do, instead of waiting for them.

    Cost: 1 round; m bytes per rank, (n - 1) * m at the root.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    others = [root + step for step in range(1, n)]
    if others:
        mine, theirs, away = root, root + 1, rank != root
        push = fold(at(root, IN, mine), to=[at(r, OUT, mine) for r in others], where=rank == root)
        pull = fold(at(root, IN, theirs), to=at(rank, OUT, theirs), count=n - 1, where=away)
        yield [push, pull]
    yield keep(rank, count=n, where=rank == root)


@algorithm("broadcast", "relay", chunks=BLOCKS, slots=BLOCKS, root=0)
def broadcast_relay(rank, n, root):
    """The root lays block after block out in scratch memory, and the others fetch behind it.

    For vectors that the others cannot read where they lie: both copies go on at the same time.

    Cost: 2 rounds; m bytes per rank, (n - 1) * m at the root.
    Source: Träff and Ripke, "Optimal broadcast for fully connected processor-node networks", JPDC
    68(7), 2008 (pipelining by blocks).
    """
    for block in range(BLOCKS + 1):
        lay = fold(at(root, IN, block), to=at(root, TMP, block), where=rank == root)
        fetch = fold(at(root, TMP, block - 1), to=at(rank, OUT, block - 1), where=rank != root)
        yield [lay] * (block < BLOCKS) + [fetch] * (block > 0)
    yield keep(rank, count=BLOCKS, where=rank == root)


@algorithm("scatter", "direct", root=0)
def scatter(rank, n, root):
    """Every rank fetches its block from the root.

    Cost: 1 round; m / n bytes per rank, (n - 1) / n * m at the root.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    yield fold(at(root, IN, rank), to=at(rank, OUT, rank))


@algorithm("gather", "direct", root=0)
def gather(rank, n, root):
    """Every rank stores its block at the root.

    Cost: 1 round; m / n bytes per rank, (n - 1) / n * m at the root.
    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory,
    practice, and experience", CCPE 19(13), 2007 (definition of the collectives).
    """
    yield fold(at(rank, IN, rank), to=at(root, OUT, rank))


@algorithm("all_to_all", "direct", in_place=False)
def all_to_all(rank, n):
    """Every rank fetches its block from all the others, nearest first.

    Cost: 1 round; (n - 1) / n * m bytes per rank.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005 (all receives posted at once).
    """

    def fetch(step):
        return fold(at(rank + step, IN, rank), to=at(rank, OUT, rank + step))

    yield together(range(n), fetch)

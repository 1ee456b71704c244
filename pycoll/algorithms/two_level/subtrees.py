"""All-reduce over hosts that the tree over all ranks is not made of, such as four of three ranks.

Some subtrees of that tree have all of their ranks on one host. A host adds up the largest of these,
and hands on one vector for each; whoever gets those of all hosts adds them up along the rest of the
tree. So the bits are those of the tree over all ranks, wherever these are. A host of p consecutive
ranks has at most 2 log2(p) such subtrees, one if trees nest. p, H and m as in `plans`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pycoll.algorithms.two_level.plans import fetch_columns
from pycoll.algorithms.two_level.stages import NONE, Hosts, Stage, TwoLevels, across_stage
from pycoll.schedule.ir import IN, OUT, TMP, Algorithm, Fold, Vector, algorithm, at, fold, together


class Part(NamedTuple):
    """A subtree whose ranks share a host: the host, and its number there."""

    host: int
    number: int


Tree = Any  # a leaf, or a pair of trees


def tree_of(leaves: Sequence[Any]) -> Tree:
    """Return the in-order balanced tree over some leaves, as nested pairs."""
    level = list(leaves)
    extra = len(level) - (1 << (len(level).bit_length() - 1))
    level = [
        *zip(level[: 2 * extra : 2], level[1 : 2 * extra : 2], strict=True),
        *level[2 * extra :],
    ]
    while len(level) > 1:
        level = list(zip(level[::2], level[1::2], strict=True))
    return level[0]


def _leaves(tree: Tree) -> tuple[int, ...]:
    return (*_leaves(tree[0]), *_leaves(tree[1])) if isinstance(tree, tuple) else (tree,)


class Subtrees(NamedTuple):
    """The tree over all ranks, cut where it leaves hosts."""

    parts: tuple[tuple[tuple[int, ...], ...], ...]  # ranks of each part of each host
    top: Tree  # its leaves are parts

    @property
    def most(self) -> int:
        """Largest number of parts of a host."""
        return max(map(len, self.parts))


@lru_cache(64)
def cut_of(of: tuple[int, ...]) -> Subtrees:
    """Cut the tree over ranks; `of` is the host of each."""
    parts: list[list[tuple[int, ...]]] = [[] for _ in range(max(of) + 1)]

    def cut(tree: Tree) -> Tree:
        ranks = _leaves(tree)
        host = of[ranks[0]]
        if any(of[rank] != host for rank in ranks):
            return cut(tree[0]), cut(tree[1])
        parts[host].append(ranks)
        return Part(host, len(parts[host]) - 1)

    top = cut(tree_of(range(len(of))))
    return Subtrees(tuple(map(tuple, parts)), top)


@lru_cache(256)
def _inside(parts: tuple[tuple[int, ...], ...], most: int) -> Algorithm:
    """Return what adds up the parts of a host: rank i of it has ``most`` chunks, one for each."""

    def rounds(rank: Vector, n: int) -> Iterator[list[Fold]]:
        yield [
            fold(
                [at(peer, IN, rank * most + q) for peer in part],
                to=at(rank, OUT, rank * most + q),
                tree=True,
            )
            for q, part in enumerate(parts)
        ]

    return algorithm("reduce_scatter", "inside", chunks=lambda n: n * most)(rounds)


@lru_cache(64)
def _between(of: tuple[int, ...]) -> Algorithm:
    """Return what adds up the parts of all hosts.

    Chunk ``c * most + q`` of the input is chunk c of part q, and of the output, for q = 0, the sum.
    """
    cut = cut_of(of)
    most = cut.most
    parts = [Part(host, q) for host, found in enumerate(cut.parts) for q in range(len(found))]
    number = {part: slot for slot, part in enumerate(parts)}

    def rounds(rank: Vector, n: int) -> Iterator[Any]:
        own = rank * most
        yield [
            fold(at(part.host, IN, own + part.number), to=at(rank, TMP, slot))
            for part, slot in number.items()
        ]
        for level in _levels(cut.top, number):
            yield [
                fold(
                    [at(rank, TMP, left), at(rank, TMP, right)],
                    to=at(rank, TMP, slot) if slot is not None else at(rank, OUT, own),
                )
                for slot, left, right in level
            ]

        def fetch(step: Vector) -> Fold:
            there = rank + step
            return fold(at(there, OUT, there * most), to=at(rank, OUT, there * most))

        yield together(range(1, n), fetch)

    slots = 2 * len(number)
    return algorithm("all_reduce", "between", chunks=lambda n: n * most, slots=slots)(rounds)


def _levels(top: Tree, number: dict[Part, int]) -> list[list[tuple[int | None, int, int]]]:
    """Return the sums of pairs by height: slot of the result, None for the last, and of both."""
    levels: list[list[tuple[int | None, int, int]]] = []
    free = iter(range(len(number), 2 * len(number)))

    def visit(tree: Tree) -> tuple[int, int]:
        """Return the slot of a sum, and its height."""
        if isinstance(tree, Part):
            return number[tree], 0
        (left, low), (right, high) = visit(tree[0]), visit(tree[1])
        height = max(low, high) + 1
        levels.extend([] for _ in range(height - len(levels)))
        slot = None if tree is top else next(free)
        levels[height - 1].append((slot, left, right))
        return (NONE if slot is None else slot), height

    visit(top)
    return levels


def all_reduce(hosts: Hosts) -> TwoLevels:
    """Add up the parts of hosts, add these up between hosts, fetch the columns.

    Cost: (H - 1) / H * (k + 1) m out of a host of k parts.
    """
    cut = cut_of(hosts.of)
    most, share = cut.most, hosts.count
    slots = np.arange(most * share).reshape(most, share)  # of each part
    shape = hosts.n, hosts.most * most * share
    gives, takes = np.full(shape, NONE), np.full(shape, NONE)
    across = across_stage(hosts, _between(hosts.of), {}, 1, most * share, TMP, OUT)
    for group, ordered in zip(hosts.groups, hosts.ordered, strict=True):
        for column, owner in enumerate(ordered[: hosts.columns]):
            places = column * share + np.arange(share)
            first = group.index(owner) * most * share
            mine = slice(first, first + most * share)
            gives[list(group), mine] = np.tile(places, most)
            takes[owner, mine] = slots.ravel()
            across.gives[owner] = slots.T.ravel()
            across.takes[owner, ::most] = places
    local = [
        tuple(tuple(group.index(rank) for rank in part) for part in parts)
        for group, parts in zip(hosts.groups, cut.parts, strict=True)
    ]
    inside = tuple(_inside(parts, most) for parts in local)
    ends = hosts.buffers(IN), hosts.buffers(TMP)
    before = Stage(hosts.groups, inside, {}, share, gives, takes, *ends)
    after = fetch_columns(hosts, lambda column: range(column * share, (column + 1) * share))
    return TwoLevels(before, across, None, after, hosts.columns * share, slots.size)

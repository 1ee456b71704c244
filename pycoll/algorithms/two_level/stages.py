"""Collectives over hosts: each is the same collective among hosts, with a stage on either side.

The ranks of every host divide the pieces of a call among *owners*, one for each *column*. In the
first stage the ranks of a host hand their pieces to the owners, who combine them where something is
reduced. In the second, the owners of a column run the collective itself, as if each were its host.
In the third, the ranks of a host fetch from the owners what is theirs. One column makes one rank
speak for its host; as many columns as ranks make all of them send, each a part.

A stage is an ordinary algorithm on teams of ranks, and two tables that say where its chunks lie for
each rank. Hosts may have different numbers of ranks, numbered in any way.

Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect: decomposing all-reduce for deep
learning on heterogeneous network hierarchy", MLSys 2019; Kandalla, Subramoni, Vishnu and Panda,
"Designing topology-aware collective communication algorithms", 2010 (leaders of hosts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pycoll.algorithms import direct
from pycoll.schedule.ir import IN, OUT, Algorithm, Buffer, Fold, Piece

NONE = -1
"""In a table of places: this rank has, or wants, nothing of a chunk."""

Item = tuple[int, int, dict[int, int]]  # holder, place there, place for each rank that takes it


@dataclass(frozen=True)
class Stage:
    """An algorithm on teams of ranks, and where its chunks lie."""

    teams: tuple[tuple[int, ...], ...]  # ranks that run it together; no rank is in two teams
    algorithm: Algorithm | tuple[Algorithm, ...]  # what they run, or what each of them does
    params: dict[str, int]  # its parameters; ranks are counted within the team
    share: int  # chunks here for each chunk of the algorithm
    # gives, takes: ``[n, chunks]`` place of each chunk in the rank's source and target, or NONE
    gives: np.ndarray
    takes: np.ndarray
    # source, target: ``[n]`` buffer of each rank. A place is a chunk of the whole vector, or in
    # TMP a slot.
    source: tuple[Buffer, ...]
    target: tuple[Buffer, ...]

    def algorithm_of(self, team: tuple[int, ...]) -> Algorithm:
        """Return what a team runs."""
        if isinstance(self.algorithm, Algorithm):
            return self.algorithm
        return self.algorithm[self.teams.index(team)]


@dataclass(frozen=True)
class TwoLevels:
    """The stages of a call."""

    before: Stage  # inside hosts; every rank takes part, if only to show that it makes this call
    across: Stage  # between hosts; only owners take part
    between: Stage | None  # inside hosts, meanwhile; or None
    after: Stage  # inside hosts
    chunks: int  # chunks of the whole vector
    slots: int  # slots of scratch memory of each rank


@dataclass(frozen=True)
class Hosts:
    """Which rank is where."""

    of: tuple[int, ...]  # number of the host of each rank, counted from 0 in rank order
    columns: int = 1  # number of columns, at most the smallest number of ranks of a host
    root: int = 0  # rank that owns column 0 on its host

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        count = max(self.of) + 1
        return tuple(tuple(r for r, h in enumerate(self.of) if h == host) for host in range(count))

    @cached_property
    def ordered(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host, the root first; the first ``columns`` of them are the owners."""
        return tuple(tuple(sorted(g, key=lambda r: (r != self.root, r))) for g in self.groups)

    @property
    def n(self) -> int:
        """World size."""
        return len(self.of)

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.groups)

    @property
    def most(self) -> int:
        """Largest number of ranks of a host."""
        return max(map(len, self.groups))

    @property
    def depth(self) -> int:
        """Largest number of ranks of a host in one column."""
        return -(-self.most // self.columns)

    @property
    def all_own(self) -> bool:
        """Whether every rank owns a column."""
        return all(len(group) == self.columns for group in self.groups)

    def buffers(self, usual: Buffer, at_root: Buffer | None = None) -> tuple[Buffer, ...]:
        """Return the buffer that each rank uses; the root may use another one."""
        root = usual if at_root is None else at_root
        return tuple(root if rank == self.root else usual for rank in range(self.n))

    def owner(self, host: int, column: int) -> int:
        """Return who owns a column on a host."""
        return self.ordered[host][column]

    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Return the owners of each column, by host."""
        return tuple(zip(*(group[: self.columns] for group in self.ordered), strict=True))

    def ranks(self, host: int, column: int) -> list[tuple[int, int]]:
        """List the ranks of a host whose own blocks go through a column, numbered."""
        return list(enumerate(self.ordered[host][column :: self.columns]))


def fold_stage(hosts: Hosts, places: Callable[[int], Sequence[int]], target: Buffer) -> Stage:
    """Let every owner combine its places of the inputs of its host, and store them as numbered.

    Args:
        hosts: Who is where.
        places: Chunks of each column; those of TMP are slots in this order.
        target: OUT for the same places, TMP for slots.
    """
    share = max(len(places(c)) for c in range(hosts.columns))
    shape = hosts.n, hosts.most * share
    gives, takes = np.full(shape, NONE), np.full(shape, NONE)
    for group, ordered in zip(hosts.groups, hosts.ordered, strict=True):
        for column, owner in enumerate(ordered[: hosts.columns]):
            mine = np.asarray(places(column))
            first = group.index(owner) * share
            at = slice(first, first + len(mine))
            gives[list(group), at] = mine
            slots = np.where(mine == NONE, NONE, np.arange(len(mine)))
            takes[owner, at] = mine if target == OUT else slots
    ends = hosts.buffers(IN), hosts.buffers(target)
    return Stage(hosts.groups, direct.reduce_scatter[0], {}, share, gives, takes, *ends)


def fetch_stage(hosts: Hosts, items: Iterable[Item], source: Buffer, target: Buffer) -> Stage:
    """Let the ranks of every host take items from the source of others to their target."""
    held: list[list[Item]] = [[] for _ in hosts.of]
    for item in items:
        held[item[0]].append(item)
    share = max(1, *map(len, held))
    shape = hosts.n, hosts.most * share
    gives, takes = np.full(shape, NONE), np.full(shape, NONE)
    for group in hosts.groups:
        for i, holder in enumerate(group):
            for t, (_, place, takers) in enumerate(held[holder]):
                gives[holder, i * share + t] = place
                for taker, wanted in takers.items():
                    takes[taker, i * share + t] = wanted
    ends = hosts.buffers(source), hosts.buffers(target)
    return Stage(hosts.groups, direct.all_gather_pull, {}, share, gives, takes, *ends)


def across_stage(
    hosts: Hosts,
    algorithm: Algorithm,
    params: dict[str, int],
    share: int,
    chunks: int,
    source: Buffer,
    target: Buffer,
) -> Stage:
    """Make the stage between hosts, with empty tables of ``chunks`` entries."""
    tables = np.full((hosts.n, chunks), NONE), np.full((hosts.n, chunks), NONE)
    ends = hosts.buffers(source), hosts.buffers(target)
    return Stage(hosts.teams(), algorithm, params, share, *tables, *ends)


def refined(algorithm: Algorithm, share: int) -> Algorithm:
    """Cut every chunk of an algorithm into ``share`` chunks."""
    if share == 1:
        return algorithm

    def finer(piece: Piece) -> Piece:
        return replace(piece, chunk=piece.chunk * share)

    def rounds(rank: Any, n: int, **params: Any) -> Iterator[list[Fold]]:
        for folds in algorithm.schedule(n, **params).rounds(rank):
            yield [f.placed(finer, share) for f in folds]

    return replace(
        algorithm,
        rounds=rounds,
        chunks=lambda n, **params: share * algorithm.chunks(n, **params),
        slots=lambda n, **params: share * algorithm.slots(n, **params),
    )

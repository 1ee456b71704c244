"""Which ranks share a host, and which calls go in two levels for that reason.

Reduction order: inside hosts and between them there are two trees, which make up the tree of all
ranks where hosts nest in it (see `Topology.nests`), and any order where order makes no difference
(integers, and minimum and maximum over consecutive ranks). Where hosts do not nest, an all_reduce
goes by subtrees. All else goes by messages between all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pycoll.algorithms.two_level.stages import Hosts
from pycoll.algorithms.two_level.subtrees import cut_of, tree_of
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.selection.select import Choice
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import DType, Kind, Order, ReduceOp

ONE_COLUMN_BYTES = 64 << 10
MOST_SUBTREES = 64  # of all hosts: every owner of a column gets a message for each
_ONE_LEADER = ("gather", "scatter")  # with more ranks than one, hosts first would save nothing


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a communicator are."""

    hosts: tuple[int, ...]  # number of the host of each rank, counted from 0 in rank order
    rank: int
    cores: int = 1 << 16  # cores that the ranks of a host may use together, where these are fewest

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        return Hosts(self.hosts).groups

    @property
    def mates(self) -> list[int]:
        """Ranks of this host."""
        return list(self.groups[self.hosts[self.rank]])

    @property
    def useful(self) -> bool:
        """Whether there are two levels: several hosts, one of them with several ranks."""
        return 1 < max(self.hosts) + 1 < len(self.hosts)

    @cached_property
    def nests(self) -> bool:
        """Whether trees inside hosts and a tree over hosts make up the tree over all ranks."""
        return tree_of(range(len(self.hosts))) == tree_of([tree_of(g) for g in self.groups])

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks of every host follow each other: of 0.0 and -0.0 the last one wins."""
        return list(self.hosts) == sorted(self.hosts)

    def gives(self, spec: CallSpec) -> bool:
        """Whether a call can go in two levels with the bits of one level, and should."""
        if spec.kind > Kind.BARRIER:
            return False
        nbytes = spec.count * spec.itemsize
        return self._keeps_bits(spec.collective, nbytes, spec.dtype, spec.op, spec.order)

    def takes(self, choice: Choice) -> bool:
        """Whether a call that names no algorithm goes in two levels, whatever was chosen."""
        request = choice.request
        order = Order[(choice.order or "any").upper()]
        dtype = DType.UINT8 if request.dtype is None else request.dtype
        return self._keeps_bits(request.collective, request.nbytes, dtype, request.op, order)

    def _keeps_bits(
        self, collective: str, nbytes: int, dtype: int, op: ReduceOp, order: Order
    ) -> bool:
        if not self.useful:
            return False
        if collective in _ONE_LEADER:
            return nbytes <= ONE_COLUMN_BYTES
        if not COLLECTIVES[collective].reduces:
            return True
        element = DType(dtype)
        if not element.is_float or order == Order.ANY:
            return True
        if not op.rounds:
            return self.in_order
        if order != Order.TREE or element.rounds_once:
            return False
        return self.nests or (collective == "all_reduce" and self.few_subtrees)

    @cached_property
    def few_subtrees(self) -> bool:
        """Whether hosts have few vectors to hand on: beside their ranks, and all in all."""
        cut = cut_of(self.hosts)
        beside = 2 * cut.most <= max(map(len, self.groups)) + 2
        return beside and sum(map(len, cut.parts)) <= MOST_SUBTREES

    def by_subtrees(self, spec: CallSpec) -> bool:
        """Whether a call goes along the tree over all ranks, which trees over hosts do not make."""
        rounds = spec.collective == "all_reduce" and DType(spec.dtype).is_float and spec.op.rounds
        return rounds and spec.order == Order.TREE and not self.nests

    def columns(self, collective: str, nbytes: int) -> int:
        """Return how many ranks of a host speak for it, each for a part of the vector."""
        if collective in _ONE_LEADER or nbytes <= ONE_COLUMN_BYTES:
            return 1
        return min(self.cores, *map(len, self.groups))

"""What a call asks for, and which algorithms can serve it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pycoll.runtime.selection.rules import Rule
from pycoll.schedule.ir import Algorithm, Buffer
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.table import remote_buffers
from pycoll.types import DType, ReduceOp

MOVE_BELOW = 256 << 10
"""Larger calls that only move data into private results go as ordinary arrays do: there the kernel
copies as fast as the memory is."""

_EXACT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)


@dataclass(frozen=True)
class Wish:
    """What a call asks for, all of it the same on every rank.

    Attributes:
        collective: Its name.
        nbytes: Size of the full vector.
        n: World size.
        order: Reduction order; ``""`` when nothing is reduced.
        dtype: Element type, or None when it does not matter.
        op: Reduction operation.
        direct: All arrays lie in symmetric memory.
        input_only: Only the inputs do.
        in_place: A direct plan has to work when input and output are the same memory.
        messages: Ranks send messages; otherwise they share memory.
        one_host: All ranks are on one host; matters where they send messages.
        crowded: Ranks that share memory outnumber the cores that they may use.
    """

    collective: str
    nbytes: int
    n: int
    order: str
    dtype: DType | None = None
    op: ReduceOp = ReduceOp.SUM
    direct: bool = False
    input_only: bool = False
    in_place: bool = True
    messages: bool = False
    one_host: bool = False
    crowded: bool = False

    def obstacle(self, algorithm: Algorithm) -> str:
        """Say why an algorithm cannot serve; empty if it can."""
        if not algorithm.works_for(self.n):
            return f"not defined for {self.n} ranks"
        if self.order not in ("tree", "rank"):
            return ""
        if algorithm.order != self.order:
            return f"gives order {algorithm.order}, not {self.order}"
        rounds_once = self.dtype is not None and self.dtype.rounds_once
        if rounds_once and self.op not in _EXACT and not folds_at_once(algorithm, self.n):
            return f"rounds {self.dtype.name.lower()} at every hop, not once"
        if rounds_once and self.op == ReduceOp.AVG and not divides_at_once(algorithm, self.n):
            return f"rounds {self.dtype.name.lower()} before it divides by the number of ranks"
        return ""

    def may_be_direct(self, algorithm: Algorithm) -> bool:
        """Whether peers may work on the arrays of this call themselves."""
        if self.input_only:
            small = self.nbytes <= MOVE_BELOW or COLLECTIVES[self.collective].reduces
            return small and only_reads(algorithm, self.n)
        return self.direct and (algorithm.in_place or not self.in_place)

    def fits(self, rule: Rule) -> bool:
        """Whether a line of the table is about this call."""
        return (
            rule.collective == self.collective
            and self.n <= rule.max_n
            and self.nbytes <= rule.max_bytes
            and (self.direct or self.input_only or not rule.direct)
            and (self.crowded or not rule.crowded)
        )


@functools.lru_cache(1024)
def folds_at_once(algorithm: Algorithm, n: int) -> bool:
    """Whether every reduction of a result happens in one fold of the contributions of all ranks."""
    if n <= 2:
        return True
    schedule = algorithm.schedule(n)
    folds = (f for group in schedule.rounds(schedule.all_ranks()) for f in group)
    return all(len(f.srcs) in (1, n) for f in folds if f.happens)


@functools.lru_cache(1024)
def divides_at_once(algorithm: Algorithm, n: int) -> bool:
    """Whether a mean is divided in the fold that sums it, before it is rounded."""
    return algorithm.schedule(n).reduces_at_once


@functools.lru_cache(1024)
def only_reads(algorithm: Algorithm, n: int) -> bool:
    """Whether ranks read each other's inputs and never touch each other's results."""
    return not remote_buffers(algorithm.schedule(n)) & {Buffer.OUT, Buffer.ACC}

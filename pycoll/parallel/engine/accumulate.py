"""Adding up micro-batches on one rank, along the same tree that adds up ranks.

With ``order="tree"`` the sum over ranks is an in-order balanced tree. When the micro-batches of a
rank are added along such a tree too, trees nest: r ranks with k micro-batches each give the bits
of r * k ranks with one, for powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pycoll.errors import ArgumentError

T = TypeVar("T")


class Turn(NamedTuple):
    """What to do with one term: add it to the last sum or start a new one, then merge sums."""

    add: bool
    merges: int


def turns(k: int, order: str) -> list[Turn]:
    """Plan the sum of k terms that come one after the other.

    Args:
        k: Number of terms.
        order: ``"tree"``: the in-order balanced tree of docs/architecture.md; needs up to
            ``ceil(log2(k)) - 1`` sums besides the first. ``"rank"`` or ``"any"``: from left to
            right.
    """
    if order not in ("tree", "rank", "any"):
        raise ArgumentError(f"order={order!r} is not known; accepted: tree, rank, any")
    if order != "tree" or k <= 2:
        return [Turn(i > 0, 0) for i in range(k)]
    power = 1 << (k.bit_length() - 1)
    extra = k - power
    plan, levels = [], []
    for i in range(k):
        if i < 2 * extra and i % 2 == 0:  # first of a pair that stands for one leaf
            levels.append(-1)
            plan.append(Turn(False, 0))
            continue
        pair = i < 2 * extra
        add = pair or bool(levels and levels[-1] == 0)
        if add:
            levels[-1] += 1
        else:
            levels.append(0)
        merges = 0
        while len(levels) > 1 and levels[-1] == levels[-2]:
            levels.pop()
            levels[-1] += 1
            merges += 1
        plan.append(Turn(add, merges))
    return plan


class Sums(Generic[T]):
    """The partial sums of one vector."""

    def __init__(self, first: T, new: Callable[[], T]) -> None:
        """Keep the memory of the first sum, and how to make more."""
        self._first, self._new = first, new
        self.stack: list[T] = []

    def begin(self, turn: Turn) -> T:
        """Return where the next term goes; it has to be added if ``turn.add``."""
        if not turn.add:
            self.stack.append(self._new() if self.stack else self._first)
        return self.stack[-1]

    def end(self, turn: Turn) -> None:
        """Merge sums, after the term is in."""
        for _ in range(turn.merges):
            last: Any = self.stack.pop()
            self.stack[-1] += last

    def take(self) -> T:
        """Return the sum of all terms and forget it."""
        (total,) = self.stack
        self.stack = []
        return total

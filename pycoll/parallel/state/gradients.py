"""The gradient of one bucket during a step: collected, summed, reduced as soon as it is complete.

Layers write their gradients into the bucket's flat vector, or they are copied there as they arrive.
With the last one the bucket is complete, and its reduction starts in the background while the
backward pass goes on. Stages 0 and 1 of ZeRO add micro-batches up in full and reduce once; stages 2
and 3 reduce every micro-batch and add up shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycoll import kernels
from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Groups, Pending
from pycoll.parallel.optim import Optimizer
from pycoll.parallel.precision import Precision, dtype_of
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Entry, Layout
from pycoll.parallel.state.placement import Placement, Preset, own_block


@dataclass(frozen=True)
class Settings:
    """Settings that all buckets of a run share; see `pycoll.parallel.Options`.

    `storage` is where their states are; None: in memory.
    """

    preset: Preset
    precision: Precision
    order: str
    optimizer: Optimizer
    hook: Hook
    fused: bool
    storage: Any = None


class Term(NamedTuple):
    """What to do with one term: add it to the last sum or start a new one, then merge sums.

    With ``order="tree"`` the sum over ranks is an in-order balanced tree. When the micro-batches of
    a rank are added along such a tree too, trees nest: r ranks with k micro-batches each give the
    bits of r * k ranks with one, for powers of two.
    """

    add: bool
    merges: int


def plan_sum(k: int, order: str) -> list[Term]:
    """Plan the sum of k terms, in the order in which they arrive.

    ``"tree"`` is the in-order balanced tree of docs/architecture.md and needs up to
    ``ceil(log2(k)) - 1`` sums besides the first; ``"rank"`` and ``"any"`` go from left to right.
    """
    if order != "tree" or k <= 2:
        return [Term(i > 0, 0) for i in range(k)]
    power = 1 << (k.bit_length() - 1)
    extra = k - power
    plan, levels = [], []
    for i in range(k):
        if i < 2 * extra and i % 2 == 0:  # first of a pair that stands for one leaf
            levels.append(-1)
            plan.append(Term(False, 0))
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
        plan.append(Term(add, merges))
    return plan


class Sums:
    """The partial sums of one vector."""

    def __init__(self, first: Any, new: Callable[[], Any]) -> None:
        self._first, self._new = first, new
        self.stack: list[Any] = []

    def begin(self, term: Term) -> Any:
        """Return where the next term goes; it has to be added if ``term.add``."""
        if not term.add:
            self.stack.append(self._new() if self.stack else self._first)
        return self.stack[-1]

    def end(self, term: Term) -> None:
        """Merge sums, after the term is in."""
        for _ in range(term.merges):
            last = self.stack.pop()
            self.stack[-1] += last

    def take(self) -> Any:
        """Return the sum of all terms and forget it."""
        (total,) = self.stack
        self.stack = []
        return total


def sum_losses(losses: Sequence[tuple[float, int]], order: str) -> np.ndarray:
    """Return the sums of losses and of numbers of samples, added as gradients are."""
    totals = Sums(np.zeros(2), partial(np.zeros, 2))
    for term, pair in zip(plan_sum(len(losses), order), losses, strict=True):
        total = totals.begin(term)
        total += pair
        totals.end(term)
    return totals.take()


def _empty(channel: Channel, layout: Layout, count: int, dtype: Any, kind: str) -> Any:
    """Allocate a vector; only the padding is zero, everything else is written later."""
    data = channel.empty(count, dtype, kind)
    data[layout.count :] = 0
    return data


class Gradients:
    """The gradient of one bucket.

    Attributes:
        result: After `finish`: the sum over micro-batches and ranks; all of it, or this rank's
            shard if the optimizer is sharded.
        kept: The flat vector that stays from step to step: all of the gradient, with stages 2 and
            3 this rank's shard.
        bad: Names of parameters in which this rank has seen an infinity or a NaN this step.
        arrived: Names of parameters that got a gradient in this micro-batch.
    """

    def __init__(self, layout: Layout, settings: Settings, groups: Groups) -> None:
        self._layout, self._order, self._hook = layout, settings.order, settings.hook
        self._groups, self._channel = groups, groups.shards
        self._dtype = dtype_of(settings.precision.gradient)
        self._entries = {entry.parameter.name: entry for entry in layout.entries}
        self._scatter = settings.preset.optimizer == Placement.SHARD
        self._each = settings.preset.gradient == Placement.SHARD  # reduce each micro-batch
        self._shard = layout.padded // self._channel.world_size
        size = self._shard if self._each else layout.padded
        self.kept: Any = self._channel.empty(size, self._dtype, "gradient")
        self.kept[...] = 0
        more = partial(_empty, self._channel, layout, size, self._dtype, "accumulator")
        self._sums = Sums(self.kept, more)
        self._term, self._last = Term(False, 0), True
        self._data: Any = None
        self._missing: dict[str, int] = {}
        self._terms: dict[str, Any] = {}
        self._flight: tuple[Pending, Any, Any, Term] | None = None
        self._lent = False
        self.result: Any = None
        self.bad: set[str] = set()
        self.arrived: set[str] = set()

    def begin(self, term: Term, last: bool) -> None:
        """Expect the gradients of a micro-batch."""
        self._term, self._last, self._data = term, last, None
        self._missing = {name: e.parameter.uses for name, e in self._entries.items()}
        self.arrived = set()

    def place(self, name: str) -> Any:
        """Return the view of the flat vector where a layer may write a gradient.

        None if the gradient has to be added to something: an earlier micro-batch, or another use of
        a tied parameter.
        """
        entry = self._entries[name]
        return None if self._adds or entry.parameter.uses > 1 else self._view(entry)

    @property
    def _adds(self) -> bool:
        """Whether gradients are added to those of earlier micro-batches."""
        return self._term.add and not self._each

    def check(self, name: str, gradient: Any) -> None:
        """Refuse a gradient that cannot be added.

        Raises:
            ArgumentError: If its shape is not that of the parameter.
        """
        shape = tuple(self._entries[name].parameter.spec.shape)
        if gradient is not None and tuple(gradient.shape) != shape:
            raise ArgumentError(
                f"rank {self._groups.world.rank}: the gradient of {name} has shape "
                f"{tuple(gradient.shape)}, the parameter has {shape}"
            )

    def add(self, name: str, gradient: Any, placed: bool = False) -> None:
        """Take the gradient of one use of a parameter; reduce when the bucket is complete.

        None stands for zeros; a `placed` gradient has been written where `place` said.
        """
        entry = self._entries[name]
        self._missing[name] -= 1
        if placed or gradient is not None:
            self.arrived.add(name)
        if not placed and gradient is not None and entry.parameter.uses > 1:
            gradient = self._terms.pop(name, 0) + gradient  # uses of tied ones count as one
            self._terms[name] = gradient
        if self._missing[name] == 0:
            if not placed:
                self._store(entry, self._terms.pop(name, gradient))
            if not any(self._missing.values()):
                self._complete()

    def _view(self, entry: Entry) -> Any:
        if self._data is None:
            size = self._layout.padded
            self._data = (
                _empty(self._channel, self._layout, size, self._dtype, "gradient in flight")
                if self._each
                else self._sums.begin(self._term)
            )
        return entry.view(self._data)

    def _store(self, entry: Entry, gradient: Any) -> None:
        view = self._view(entry)
        if not self._adds:
            view[...] = 0 if gradient is None else gradient
        elif gradient is not None:
            view += gradient

    def _complete(self) -> None:
        """Reduce the bucket, or wait for more micro-batches."""
        data, self._data, term = self._data, None, self._term
        if not self._each:
            self._sums.end(term)
            if not self._last:
                return
            data = self._sums.take()
        self._prepare(data)
        out = None
        if self._each:
            self.land()
            out = self._sums.begin(term)
            if term.add:
                out = self._channel.empty(self._shard, self._dtype, "gradient in flight")
        elif self._scatter:
            out = own_block(data, self._channel.rank, self._channel.world_size)
        self._reduce(data, out, term)

    def _prepare(self, data: Any) -> None:
        """Look for infinities; add gradients that each tensor-parallel rank has only part of."""
        if kernels.count_nonfinite(data):
            for entry in self._layout.entries:
                if kernels.count_nonfinite(data[entry.start : entry.stop]):
                    self.bad.add(entry.parameter.name)
        for entry in self._layout.entries:
            if entry.parameter.spec.sequence:
                part = data[entry.start : entry.stop]
                self._groups.tensor.all_reduce(part, "sequence", self._order).wait()

    def _reduce(self, data: Any, out: Any, term: Term) -> None:
        """Start the reduction over the shards' group."""
        key = self._layout.entries[0].parameter.name
        context = (self._layout, self._channel, self._order)
        if out is None:
            pending = self._hook.all_reduce(key, data, *context)
        else:
            pending = self._hook.reduce_scatter(key, data, out, *context)
        self._flight, self._lent = (pending, data, out, term), False

    @property
    def in_flight(self) -> bool:
        """Whether a reduction in flight has memory of its own: not waited for, and not lent."""
        return self._flight is not None and not self._lent

    def lends(self, count: int, dtype: Any) -> bool:
        """Tell whether there is a reduction in flight with a vector that is large enough."""
        return self.in_flight and self._dtype == dtype and count <= self._layout.padded

    def lend(self, count: int) -> Any:
        """Return part of the vector in flight for the channel's next call; `land` after that."""
        self._lent = True
        return self._flight[1][:count]

    def reset(self) -> None:
        """Forget the rest of a failed step, once its reduction in flight has ended.

        A reduction in flight reads and writes `kept`, where the next gradients go.

        Raises:
            CollError: If it fails; it does when ranks have failed at different places.
        """
        if self._flight is not None:  # it stays if the wait fails: the next step must wait, too
            self._flight[0].wait()
        self._sums.stack, self._flight, self.result = [], None, None
        self._terms, self.bad, self._data, self._lent = {}, set(), None, False

    def land(self) -> None:
        """Wait for the reduction in flight, and free its vector."""
        if self._flight is None:
            return
        pending, _, out, term = self._flight
        self._flight = None
        ledger, name = self._groups.ledger, self._layout.entries[0].parameter.name
        before = ledger.waits.total()
        reduced = pending.wait()
        ledger.bucket_waits[name] += ledger.waits.total() - before
        if not self._each:
            self.result = reduced
            return
        if term.add:
            self._sums.stack[-1] += out
        self._sums.end(term)

    def finish(self) -> Pending:
        """Wait for the reductions over the shards' group and start that over the replicas."""
        self.land()
        if self._each:
            self.result = self._sums.take()
        return self._groups.replica.all_reduce(self.result, "replica gradient", self._order)

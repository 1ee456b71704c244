"""The gradient of one bucket during a step: collected, added up, reduced as soon as it is whole.

Layers write their gradients into the bucket's flat vector, or they are copied there as they arrive.
With the last one the bucket is whole, and its reduction starts in the background while the backward
pass goes on. What the ZeRO stages differ in: stages 0 and 1 add micro-batches up in full and reduce
once; stages 2 and 3 reduce every micro-batch and add up shards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pycoll import kernels
from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.ledger import Channel, Pending
from pycoll.parallel.engine.accumulate import Sums, Turn
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.hooks.hook import Hook
from pycoll.parallel.state.layout import Entry, Layout
from pycoll.parallel.state.placement import Placement, Preset, own_block


def _padded(data: Any, layout: Layout) -> Any:
    """Make the padding zero, of what may be a full vector; everything else is written later."""
    data[layout.count :] = 0
    return data


def _spare_sum(channel: Channel, layout: Layout, count: int, dtype: Any) -> Any:
    return _padded(channel.empty(count, dtype, "accumulator"), layout)


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

    def __init__(
        self, layout: Layout, preset: Preset, dtype: Any, order: str, groups: Groups, hook: Hook
    ) -> None:
        self.layout, self.order, self._dtype = layout, order, dtype
        self._groups, self._channel, self._hook = groups, groups.shards, hook
        self._entries = {entry.parameter.name: entry for entry in layout.entries}
        self._sharded = preset.optimizer == Placement.SHARD
        self._every = preset.gradient == Placement.SHARD
        size = layout.padded // (self._channel.world_size if self._every else 1)
        self.kept = self._channel.empty(size, dtype, "gradient")
        self.kept[...] = 0
        spare = partial(_spare_sum, self._channel, layout, size, dtype)
        self._sums: Sums[Any] = Sums(self.kept, spare)
        self._turn, self._last = Turn(False, 0), True
        self._data: Any = None
        self._waiting: dict[str, int] = {}
        self._terms: dict[str, Any] = {}
        self._flight: tuple[Pending, Any, Any, Turn] | None = None
        self._lent = False
        self.result: Any = None
        self.bad: set[str] = set()
        self.arrived: set[str] = set()

    def begin(self, turn: Turn, last: bool) -> None:
        """Expect the gradients of a micro-batch."""
        self._turn, self._last, self._data = turn, last, None
        self._waiting = {name: e.parameter.uses for name, e in self._entries.items()}
        self.arrived = set()

    def place(self, name: str) -> Any:
        """Return the view of the flat vector where a layer may write a gradient.

        None if what it writes would have to be added to something: an earlier micro-batch, or
        another use of a tied parameter.
        """
        entry = self._entries[name]
        adds = self._turn.add and not self._every
        return None if adds or entry.parameter.uses > 1 else self._view(entry)

    def add(self, name: str, gradient: Any, placed: bool = False) -> None:
        """Take the gradient of one use of a parameter; reduce when all are in.

        Args:
            name: Full name of the parameter.
            gradient: The gradient; None for zeros.
            placed: It has been written where `place` said.

        Raises:
            ArgumentError: If its shape is not that of the parameter.
        """
        entry = self._entries[name]
        self._waiting[name] -= 1
        if placed:
            self.arrived.add(name)
        elif gradient is not None:
            self.arrived.add(name)
            if tuple(gradient.shape) != tuple(entry.parameter.spec.shape):
                raise ArgumentError(
                    f"rank {self._groups.world.rank}: the gradient of {name} has shape "
                    f"{tuple(gradient.shape)}, the parameter has {entry.parameter.spec.shape}"
                )
            if entry.parameter.uses > 1:  # the terms of tied parameters count as one
                gradient = self._terms.pop(name, 0) + gradient
                self._terms[name] = gradient
        if self._waiting[name] == 0:
            if not placed:
                self._store(entry, self._terms.pop(name, gradient))
            if not any(self._waiting.values()):
                self._whole()

    def _view(self, entry: Entry) -> Any:
        if self._data is None:
            self._data = self._target()
        return self._data[entry.start : entry.stop].reshape(entry.parameter.spec.shape)

    def _store(self, entry: Entry, gradient: Any) -> None:
        view = self._view(entry)
        if not self._every and self._turn.add:
            if gradient is not None:
                view += gradient
        else:
            view[...] = 0 if gradient is None else gradient

    def _target(self) -> Any:
        if self._every:
            data = self._channel.empty(self.layout.padded, self._dtype, "gradient in flight")
            return _padded(data, self.layout)
        return self._sums.begin(self._turn)

    def _whole(self) -> None:
        data, self._data = self._data, None
        if self._every:
            self._check(data)
            self._add_over_tensor(data)
            self._reduce_micro_batch(data)
            return
        self._sums.end(self._turn)
        if self._last:
            data = self._sums.take()
            self._check(data)
            self._add_over_tensor(data)
            self._launch(data, self._turn)

    def _check(self, data: Any) -> None:
        if kernels.count_nonfinite(data):
            for entry in self.layout.entries:
                if kernels.count_nonfinite(data[entry.start : entry.stop]):
                    self.bad.add(entry.parameter.name)

    def _add_over_tensor(self, data: Any) -> None:
        """Add gradients that each tensor-parallel rank has only part of."""
        for entry in self.layout.entries:
            if entry.parameter.spec.sequence:
                part = data[entry.start : entry.stop]
                self._groups.tensor.all_reduce(part, "sequence", self.order).wait()

    def _launch(self, data: Any, turn: Turn, out: Any = None) -> None:
        key = self.layout.entries[0].parameter.name
        if not self._sharded:
            pending = self._hook.all_reduce(key, data, self.layout, self._channel, self.order)
        else:
            if out is None and self._every:
                size = self.layout.padded // self._channel.world_size
                out = self._channel.empty(size, self._dtype, "gradient in flight")
            elif out is None:
                out = own_block(data, self._channel.rank, self._channel.world_size)
            pending = self._hook.reduce_scatter(
                key, data, out, self.layout, self._channel, self.order
            )
        self._flight, self._lent = (pending, data, out, turn), False

    def _reduce_micro_batch(self, data: Any) -> None:
        self.land()
        turn = self._turn
        target = self._sums.begin(turn)
        self._launch(data, turn, None if turn.add else target)

    @property
    def in_flight(self) -> bool:
        """Whether a reduction in flight has memory of its own: not waited for, and not lent."""
        return self._flight is not None and not self._lent

    def lends(self, count: int, dtype: Any) -> bool:
        """Tell whether there is a reduction in flight with a vector that is large enough."""
        return self.in_flight and self._dtype == dtype and count <= self.layout.padded

    def lend(self, count: int) -> Any:
        """Return part of the vector in flight for what the channel does next; `land` after that."""
        if self._flight is None:
            raise AssertionError("only a vector in flight is lent")
        self._lent = True
        return self._flight[1][:count]

    def reset(self) -> None:
        """Forget what a step that failed has left, once nobody works on it any more.

        A reduction still in flight reads and writes `kept`, where the next gradients go.

        Raises:
            CollError: If it fails; it does when ranks have failed at different places.
        """
        if self._flight is not None:  # it stays if the wait fails: the next step must wait, too
            self._flight[0].wait()
        self._sums.stack, self._flight, self.result = [], None, None
        self._terms, self.bad, self._data, self._lent = {}, set(), None, False

    def land(self) -> None:
        """Wait for the reduction in flight; its full gradient is given back."""
        if self._flight is None:
            return
        pending, _, out, turn = self._flight
        self._flight = None
        done = pending.wait()
        if not self._every:
            self.result = done
            return
        if turn.add:
            self._sums.stack[-1] += out
        self._sums.end(turn)

    def finish(self) -> Pending:
        """Wait for the reductions over the shards' group and start that over the replicas."""
        self.land()
        if self._every:
            self.result = self._sums.take()
        return self._groups.replica.all_reduce(self.result, "replica gradient", self.order)

"""One bucket: parameters, gradient and optimizer states of neighbouring layers as flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.parallel.arrays import move_to
from pycoll.parallel.channels import Groups, Pending
from pycoll.parallel.optim import UpdateArgs
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.gradients import Gradients, Settings
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import Placed, Placement
from pycoll.parallel.state.states import States

Values = Callable[[str, str, int, int], Any]
"""Elements ``[start, stop)`` of this rank's part of an array, by kind, full name, start, stop."""


class Bucket:
    """The flat vectors of one bucket on this rank.

    Attributes:
        layout: Positions of the parameters.
        parameter: The parameters, replicated or sharded.
        complete: Waits until all of `parameter` is of the last step.
        gradients: Their gradient.
        first: First of the elements that this rank updates.
        size: Number of these elements.
        slots: Their optimizer states.
        anchor: The elements where replicas were last together; see `state.averaging`.
        outer: States of the optimizer that goes on from there.
    """

    def __init__(self, layout: Layout, settings: Settings, groups: Groups) -> None:
        self.layout = layout
        self._settings = settings
        self._groups = groups
        channel, precision, preset = groups.shards, settings.precision, settings.preset
        n = channel.world_size
        self._dtype = dtype_of(precision.parameter)
        stored = layout.padded // (n if preset.parameter == Placement.SHARD else 1)
        data = channel.empty(stored, self._dtype, "parameter")
        self.parameter: Placed = Placed(data, preset.parameter, channel, "parameter")
        self.complete: Pending = Pending(None, data, groups.ledger, "parameter")
        self.gradients: Gradients = Gradients(layout, settings, groups)
        steps_all = preset.optimizer != Placement.SHARD
        self.size: int = layout.padded if steps_all else layout.padded // n
        self.first: int = 0 if steps_all else self.size * channel.rank

        self._states = States(self.size, precision.state, settings.storage, groups.ledger)
        new = partial(self._states.new, data)
        self.slots: dict[str, Any] = {name: new() for name in settings.optimizer.slots}
        self.master: Any | None = new() if precision.master else None
        self.copy: Any | None = new() if precision.gradient_copy else None
        self.anchor: Any = None
        self.outer: dict[str, Any] = {}

    @property
    def version(self) -> tuple[Placed, Pending]:
        """The parameters in use; setting it makes others those in use."""
        return self.parameter, self.complete

    @version.setter
    def version(self, version: tuple[Placed, Pending]) -> None:
        self.parameter, self.complete = version

    def fork(self) -> None:
        """Go on with a copy of the parameters: the next update leaves the present ones alone."""
        old, groups = self.complete.wait(), self._groups
        data = groups.shards.empty(old.shape[0], self._dtype, "parameter")
        data[...] = old
        self.parameter = replace(self.parameter, data=data)
        self.complete = Pending(None, data, groups.ledger, "parameter")

    @property
    def states(self) -> dict[str, Any]:
        """What a checkpoint has, by kind; ``"parameters"`` is None without a master copy."""
        return {"parameters": self.master, **self.slots, **self.outer}

    def vectors(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the parameters, then all `states`: kind, vector, and its first element's place."""
        data = self.complete.wait()
        sharded = self.parameter.placement == Placement.SHARD
        yield "parameters", data, data.shape[0] * self._groups.shards.rank if sharded else 0
        for kind, vector in self.states.items():
            if vector is not None:
                yield kind, vector, self.first

    def fill(self, values: Values) -> None:
        """Set parameters and states to this rank's part of what `values` gives; None: zeros."""
        for kind, vector, first in self.vectors():
            vector[...] = 0
            for start, stop, entry in self.layout.runs(first, first + vector.shape[0]):
                name = entry.parameter.name
                part = values(kind, name, start - entry.start, stop - entry.start)
                if part is None:
                    continue
                if self.master is not None:  # whose values are rounded, as after a step
                    part = move_to(part, vector, self.master.dtype)
                vector[start - first : stop - first] = move_to(part, vector, vector.dtype)
        self.evict()

    def prefetch(self) -> None:
        """Start to read the first states, if they are in a file."""
        self._states.prefetch()

    def evict(self) -> None:
        """Let states that are in a file be in memory no longer."""
        self._states.evict()

    @property
    def scattered(self) -> bool:
        """Whether a gather takes memory and moves bytes."""
        sharded = self.parameter.placement == Placement.SHARD
        return sharded and self._groups.shards.world_size > 1

    def gather(self, lender: Gradients | None = None) -> Pending:
        """Start to gather all parameters, if given into the vector of a gradient in flight."""
        if not self.scattered:
            return self.complete
        if lender is None:
            out = self._groups.shards.empty(self.layout.padded, self._dtype, "gathered")
        else:
            out = lender.lend(self.layout.padded)
        return self.parameter.to(Placement.REPLICATE, "parameter", out=out)

    def lender(self, buckets: Sequence[Bucket]) -> Gradients | None:
        """Return the first gradient in flight into whose vector the parameters can be gathered."""
        count, dtype = self.layout.padded, self._dtype
        fitting = (b.gradients for b in buckets if b.gradients.lends(count, dtype))
        return next(fitting, None) if self.scattered else None

    def counted(self, groups: Groups) -> tuple[int, int]:
        """Return the elements that this rank counts; each is counted on one rank of all data."""
        group = groups.data
        if self.size < self.layout.padded or groups.shards.world_size == 1:
            group = groups.replica
        part, parts = group.rank, group.world_size
        lo = self.first + self.size * part // parts
        return lo, self.first + self.size * (part + 1) // parts

    def add_squares(self, limbs: np.ndarray, bad: set[str]) -> int:
        """Add the squares of the elements of the reduced gradient that this rank counts.

        `bad` gets the names of parameters with infinities or NaNs; returns how many elements are.
        """
        gradient, lo = self.gradients.result, self.first
        count = 0
        for start, stop, entry in self.layout.runs(*self.counted(self._groups)):
            spec = entry.parameter.spec
            if spec.tensor_axis is None and self._groups.tensor.rank > 0:
                continue  # the first tensor-parallel rank counts what all of them have
            found = kernels.add_squares(gradient[start - lo : stop - lo], limbs)
            if found:
                bad.add(entry.parameter.name)
            count += found
        return count

    def update(self, step: int, lr: float, scale: float, following: Bucket | None = None) -> None:
        """Update the parameters and start to send them to the ranks that need them.

        They have arrived once `complete` has been waited for. `step` counts from 1; `scale` is a
        factor of the summed gradient. The states of `following` are read meanwhile.
        """
        self.complete.wait()
        working = self.parameter.data
        if working.shape[0] > self.size:
            working = working[self.first : self.first + self.size]
        for lo, hi in self._states.walk(None if following is None else following._states):
            self._update_part(working, lo, hi, step, lr, scale)
        self.gradients.result = None
        self._publish(working)

    def _update_part(
        self, working: Any, lo: int, hi: int, step: int, lr: float, scale: float
    ) -> None:
        """Update the elements ``[lo, hi)`` of those that this rank updates."""
        settings, gradient = self._settings, self.gradients.result
        if self.copy is not None:
            kernels.unscale(gradient[lo:hi], self.copy[lo:hi], scale)
            gradient, scale = self.copy, 1.0
        for start, stop, decay in self._runs_by_decay(self.first + lo, self.first + hi):
            part = slice(start - self.first, stop - self.first)
            target = working[part] if self.master is None else self.master[part]
            slots = {name: slot[part] for name, slot in self.slots.items()}
            args = UpdateArgs(step, lr, target, gradient[part], slots, scale, decay)
            args.copy = None if self.master is None else working[part]
            settings.optimizer.update(args, settings.fused)

    @property
    def updated(self) -> Any:
        """The elements that this rank updates, in the type that is updated."""
        data = self.complete.wait()
        if self.master is not None:
            return self.master
        return data if data.shape[0] == self.size else data[self.first : self.first + self.size]

    def publish(self) -> None:
        """Start to send `updated` to the ranks that need it; see `update`."""
        data = self.complete.wait()
        own = data if data.shape[0] == self.size else data[self.first : self.first + self.size]
        if self.master is not None:
            own[...] = self.master
        self._publish(own)

    def _publish(self, working: Any) -> None:
        replicated = self.parameter.placement == Placement.REPLICATE
        if replicated and self.size < self.layout.padded:
            shard = Placed(working, Placement.SHARD, self._groups.shards, "parameter")
            self.complete = shard.to(Placement.REPLICATE, "parameter", out=self.parameter.data)

    def _runs_by_decay(self, lo: int, hi: int) -> list[tuple[int, int, bool]]:
        """Join neighbouring parameters with the same weight decay: start, stop, decay."""
        found: list[tuple[int, int, bool]] = []
        for start, stop, entry in self.layout.runs(lo, hi):
            decay = entry.parameter.spec.decay
            if found and found[-1][1:] == (start, decay):
                start = found.pop()[0]
            found.append((start, stop, decay))
        return found


def update_all(buckets: Sequence[Bucket], step: int, lr: float, scale: float) -> None:
    """Update buckets, in the order in which the layers need them; see `Bucket.update`."""
    order = buckets[::-1]
    for bucket, following in zip_longest(order, order[1:]):
        bucket.update(step, lr, scale, following)

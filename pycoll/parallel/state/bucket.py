"""One bucket: parameters, gradient and optimizer states of a few neighbours in one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.parallel.analysis.ledger import Pending
from pycoll.parallel.arrays import as_array, zeros
from pycoll.parallel.engine.gradients import Gradients
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.engine.precision import Precision, dtype_of
from pycoll.parallel.hooks.hook import Hook
from pycoll.parallel.optim import Optimizer, UpdateArgs
from pycoll.parallel.state.layout import Entry, Layout
from pycoll.parallel.state.placement import Placed, Placement, Preset, own_block


@dataclass(frozen=True)
class Settings:
    """What all buckets of a run have in common.

    Attributes:
        preset: Placements.
        precision: Number formats.
        order: Reduction order.
        optimizer: What steps the parameters.
        hook: What reduces the gradients.
        fused: Use fused kernels.
    """

    preset: Preset
    precision: Precision
    order: str
    optimizer: Optimizer
    hook: Hook
    fused: bool


class Bucket:
    """The flat vectors of one bucket on this rank.

    Attributes:
        layout: Which parameter is where.
        parameter: The parameters, replicated or sharded.
        complete: What waits until all of `parameter` is of the last step.
        gradients: Their gradient.
        slots: Optimizer states of the elements that this rank steps.
    """

    def __init__(self, layout: Layout, settings: Settings, groups: Groups) -> None:
        self.layout, self._settings, self._groups = layout, settings, groups
        channel, precision, preset = groups.shards, settings.precision, settings.preset
        n = channel.world_size
        wide, self._dtype = dtype_of(precision.state), dtype_of(precision.parameter)
        stored = layout.padded // (n if preset.parameter == Placement.SHARD else 1)
        data = channel.empty(stored, self._dtype, "parameter")
        self.parameter = Placed(data, preset.parameter, channel, "parameter")
        self.complete = Pending(None, data, groups.ledger, "parameter")
        self.gradients = Gradients(
            layout, preset, dtype_of(precision.gradient), settings.order, groups, settings.hook
        )
        sharded = preset.optimizer == Placement.SHARD
        size = layout.padded // (n if sharded else 1)
        self.first = size * channel.rank if sharded else 0  # of the elements that this rank steps
        self.size = size

        def state() -> Any:
            return groups.ledger.track(zeros(size, wide, data), "optimizer")

        self.slots = {name: state() for name in settings.optimizer.slots}
        self.master = state() if precision.master else None
        self.copy = state() if precision.gradient_copy else None

    def fill(self, values: dict[str, Any]) -> None:
        """Set the parameters: those of this rank's part of each array in `values`, by full name."""
        data = self.complete.wait()
        sharded = self.parameter.placement == Placement.SHARD
        self._fill(data, data.shape[0] * self._groups.shards.rank if sharded else 0, values)
        if self.master is not None:
            self._fill(self.master, self.first, values)

    def fill_slot(self, name: str, values: dict[str, Any]) -> None:
        """Set an optimizer state, likewise."""
        self._fill(self.slots[name], self.first, values)

    def _fill(self, data: Any, first: int, values: dict[str, Any]) -> None:
        data[...] = 0
        for start, stop, entry in self.layout.runs(first, first + data.shape[0]):
            flat = np.asarray(values[entry.parameter.name]).reshape(-1)
            part = flat[start - entry.start : stop - entry.start]
            data[start - first : stop - first] = as_array(part, data)

    @property
    def scattered(self) -> bool:
        """Whether a gather takes memory and moves bytes."""
        sharded = self.parameter.placement == Placement.SHARD
        return sharded and self._groups.shards.world_size > 1

    def gather(self, lender: Gradients | None = None) -> Pending:
        """Start to make all parameters available; the result is a flat vector.

        Args:
            lender: A gradient in flight, whose vector is used.
        """
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

    def owned(self) -> tuple[int, int]:
        """Return the elements that this rank alone accounts for, of all that have this bucket."""
        groups = self._groups
        part, parts = groups.data.rank, groups.data.world_size
        if self.size < self.layout.padded or groups.shards.world_size == 1:
            part, parts = groups.replica.rank, groups.replica.world_size
        lo = self.first + self.size * part // parts
        return lo, self.first + self.size * (part + 1) // parts

    def add_squares(self, limbs: np.ndarray, bad: set[str]) -> int:
        """Add the squares of the reduced gradient that are this rank's to count.

        Args:
            limbs: Accumulator; see `pycoll.kernels.add_squares`.
            bad: Takes the names of parameters with infinities or NaNs.

        Returns:
            How many elements are not finite.
        """
        gradient, lo = self.gradients.result, self.first
        count = 0
        for start, stop, entry in self.layout.runs(*self.owned()):
            spec = entry.parameter.spec
            if spec.tensor_axis is None and self._groups.tensor.rank > 0:
                continue  # the first tensor-parallel rank counts what all of them have
            found = kernels.add_squares(gradient[start - lo : stop - lo], limbs)
            if found:
                bad.add(entry.parameter.name)
            count += found
        return count

    def update(self, step: int, lr: float, scale: float) -> None:
        """Step the parameters and start to hand them to the ranks that need them.

        The ranks have them once `complete` has been waited for.

        Args:
            step: Number of the step, from 1 on.
            lr: Learning rate.
            scale: Factor of the summed gradient.
        """
        settings, gradient = self._settings, self.gradients.result
        self.complete.wait()
        working = self._working()
        if self.copy is not None:
            kernels.unscale(gradient, self.copy, scale)
            gradient, scale = self.copy, 1.0
        for start, stop, decay in self._stretches():
            part = slice(start - self.first, stop - self.first)
            target = working[part] if self.master is None else self.master[part]
            slots = {name: slot[part] for name, slot in self.slots.items()}
            args = UpdateArgs(step, lr, target, gradient[part], slots, scale, decay)
            args.copy = None if self.master is None else working[part]
            settings.optimizer.update(args, settings.fused)
        self.gradients.result = None
        replicated = self.parameter.placement == Placement.REPLICATE
        if replicated and self.size < self.layout.padded:
            shard = Placed(working, Placement.SHARD, self._groups.shards, "parameter")
            self.complete = shard.to(Placement.REPLICATE, "parameter", out=self.parameter.data)

    def _working(self) -> Any:
        """Return the elements of the parameters that this rank steps, as a view."""
        data = self.parameter.data
        if data.shape[0] == self.size:
            return data
        return own_block(data, self._groups.shards.rank, self._groups.shards.world_size)

    def _stretches(self) -> list[tuple[int, int, bool]]:
        """Join neighbouring parameters that are stepped alike: start, stop, weight decay."""
        found: list[tuple[int, int, bool]] = []
        for start, stop, entry in self.layout.runs(self.first, self.first + self.size):
            decay = entry.parameter.spec.decay
            if found and found[-1][1:] == (start, decay):
                start = found.pop()[0]
            found.append((start, stop, decay))
        return found

    def view(self, data: Any, entry: Entry) -> Any:
        """Return the parameter of an entry as a view of the gathered vector."""
        return data[entry.start : entry.stop].reshape(entry.parameter.spec.shape)

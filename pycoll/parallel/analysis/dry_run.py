"""A training step of the engine's own code, on arrays without elements and without other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from pycoll.parallel.channels import Groups, Ledger
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Passes
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.bucket import Bucket, update_all
from pycoll.parallel.state.gradients import plan_sum
from pycoll.parallel.state.layout import Layout, Unit


class _Shape(np.ndarray):
    """An array that says it has elements, but has none: NumPy and the kernels do no work on it.

    Memory is counted as that of a real one, by `nbytes` and by when it is collected.
    """

    claimed: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], dtype: Any) -> _Shape:
        return np.empty(0, dtype).view(_Shape)._claim(shape)

    def _claim(self, shape: Sequence[int]) -> _Shape:
        self.claimed = tuple(shape)
        return self

    def __array_finalize__(self, other: Any) -> None:
        self.claimed = getattr(other, "claimed", (0,))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.zeros_like:
            return _Shape.of(kwargs["shape"], kwargs["dtype"])
        return super().__array_function__(function, types, args, kwargs)

    shape = property(lambda self: self.claimed)

    @property
    def nbytes(self) -> int:
        return prod(self.claimed) * self.itemsize

    def __getitem__(self, key: Any) -> _Shape:
        count = len(range(*key.indices(self.claimed[0])))
        return super().__getitem__(key)._claim((count,))

    def reshape(self, *shape: Any) -> _Shape:
        return self.view()._claim(*shape)


class DryComm:
    """Rank 0 of a communicator whose calls move nothing; also a mesh of them, and their work."""

    rank = 0

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = axes
        self.world_size: int = prod(axes.values())

    @property
    def world(self) -> DryComm:
        """Return itself, as a mesh would its ranks."""
        return self

    def group(self, *names: str) -> DryComm:
        """Return the ranks along some axes."""
        return DryComm({axis: size for axis, size in self.axes.items() if axis in names})

    def dup(self) -> DryComm:
        """Return itself."""
        return self

    def empty(self, count: int, dtype: Any, device: str) -> _Shape:
        """Return an array without elements."""
        return _Shape.of((count,), dtype)

    def all_reduce(self, x: Any, **options: Any) -> DryComm:
        """Move nothing."""
        return self

    all_gather = all_reduce
    reduce_scatter = all_reduce

    def wait(self) -> None:
        """Wait for nothing."""


class DryOptimizer:
    """Has states, and does nothing."""

    def __init__(self, slots: Sequence[str]) -> None:
        self.lr: float = 0.0
        self.slots = slots

    def update(self, args: Any, fused: bool = True) -> None:
        """Leave everything as it is."""


class DryStorage:
    """A file without room: its vectors have no elements; also such a vector, and its work."""

    array: Any = None

    def __init__(self, paged: bool) -> None:
        self.paged = paged

    def vector(self, count: int, dtype: Any) -> DryStorage:
        """Return a vector without elements."""
        found = DryStorage(self.paged)
        found.array = _Shape.of((count,), dtype)
        return found

    def later(self, *call: Any) -> DryStorage:
        """Read nothing."""
        return self

    def result(self) -> None:
        """Wait for nothing."""

    def evict(self, lo: int, hi: int) -> None:
        """Write nothing."""


class DryLayer:
    """Gives gradients of all its parameters, written to `out` if the layer in its place does."""

    def __init__(self, specs: Mapping[str, ParameterSpec], dtype: Any) -> None:
        self._specs, self._dtype = specs, dtype

    def forward(self, params: Any, x: Any) -> tuple[Any, Any]:
        """Return the input."""
        return x, None

    def backward_input(self, params: Any, saved: Any, dy: Any) -> Any:
        """Return the gradient of the output."""
        return dy

    def backward_weight(
        self, params: Any, saved: Any, dy: Any, out: Any = None
    ) -> dict[str, _Shape]:
        """Return gradients of all parameters."""
        return {
            name: (out or {}).get(name, _Shape.of(spec.shape, self._dtype))
            for name, spec in self._specs.items()
        }


class DryLoss:
    """Has no gradient."""

    def forward(self, x: Any, targets: Any) -> tuple[float, int, Any]:
        """Return one sample."""
        return 0.0, 1, None

    def backward(self, saved: Any, scale: float) -> float:
        """Return no gradient."""
        return 0.0


def dry_run(
    units: Sequence[Unit],
    layouts: Sequence[Layout],
    options: Options,
    axes: Mapping[str, int],
    micro_batches: int,
) -> tuple[Counter[str], int, dict[str, int]]:
    """Run a step of rank 0; return bytes held at rest by kind, at the peak, and sent by purpose."""
    ledger, recipe = Ledger(), options.recipe
    optimizer = DryOptimizer(options.optimizer.slots)
    options = replace(options, optimizer=optimizer, hook=None, wrap=Options.wrap)
    groups: Any = Groups(DryComm(axes), ledger)  # type: ignore[arg-type]
    settings = replace(options.settings, storage=dry_storage(options))
    buckets = [Bucket(layout, settings, groups) for layout in layouts]
    dtype = dtype_of(recipe.compute or recipe.parameter)
    dry = [replace(unit, layer=DryLayer(unit.layer.parameters(), dtype)) for unit in units]
    passes = Passes(dry, buckets, DryLoss(), options, ledger)
    rest = held(ledger)
    passes.prepare()
    plan = plan_sum(micro_batches, options.order)
    for j, term in enumerate(plan):
        *_, back = passes.run((None, None), 1.0)
        for bucket in buckets:
            bucket.gradients.begin(term, j == len(plan) - 1)
        passes.back(back)
    dry_update(buckets)
    return rest, ledger.peak, ledger.sent_since(Counter())


def held(ledger: Ledger) -> Counter[str]:
    """Return bytes in memory by kind, and as ``stored`` those in a file."""
    return Counter({**ledger.live, "stored": ledger.stored.total()})


def dry_storage(options: Options) -> DryStorage | None:
    """Return where states of the optimizer are; None: in memory."""
    return DryStorage(options.device == "cpu") if options.offloads("optimizer") else None


def dry_update(buckets: Sequence[Bucket]) -> None:
    """End a step."""
    for bucket in buckets[-1:]:
        bucket.prefetch()
    for bucket in buckets:
        bucket.gradients.finish().wait()
    update_all(buckets, 1, 0.0, 1.0)

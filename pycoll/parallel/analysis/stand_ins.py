"""What stands in for ranks, files, layers and arrays, so that the engine's code can run alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from pycoll.parallel.analysis.traces import Arrays, Trace
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.state.storage import Storage


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

    def members(self, *names: str) -> list[int]:
        """Return numbers for the ranks along some axes."""
        return list(range(self.group(*names).world_size))

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


class DryStorage(Storage):
    """A file without room: its vectors have no elements; also such a vector, and its work."""

    array: Any = None

    def __init__(self, paged: bool) -> None:
        """Have no file."""
        self.paged: bool = paged

    def reserve(self, nbytes: int) -> int:
        """Reserve nothing."""
        return 0

    def release(self, start: int, nbytes: int) -> None:
        """Free nothing."""

    def vector(self, count: int, dtype: Any) -> DryStorage:
        """Return a vector without elements."""
        found = DryStorage(self.paged)
        found.array = _Shape.of((count,), dtype)
        return found

    def later(self, *call: Any) -> DryStorage:
        """Read and write nothing."""
        return self

    def result(self) -> bool:
        """Wait for nothing, which has been done."""
        return True

    def evict(self, lo: int, hi: int) -> None:
        """Write nothing."""


class DryLayer:
    """Gives gradients of all its parameters, written to `out` if the layer in its place does.

    With a trace, it keeps and returns arrays of the shapes of that, else nothing.
    """

    def __init__(
        self, specs: Mapping[str, ParameterSpec], dtype: Any, trace: Trace | None = None
    ) -> None:
        self._specs, self._dtype, self._trace = specs, dtype, trace

    def forward(self, params: Any, x: Any) -> tuple[Any, Any]:
        """Return the output, or without a trace the input."""
        if (trace := self._trace) is None:
            return x, None
        arrays = Arrays()
        arrays.bind(trace.x, x)
        return arrays.make(trace.y), [arrays.make(trace.kept)]

    def backward_input(self, params: Any, saved: Any, dy: Any) -> Any:
        """Return the gradient of the input, or without a trace that of the output."""
        if (trace := self._trace) is None:
            return dy
        arrays = Arrays()
        arrays.bind(trace.kept, saved[0])
        arrays.bind(trace.dy, dy)
        saved[0] = arrays.make(trace.used)
        return arrays.make(trace.dx)

    def backward_weight(
        self, params: Any, saved: Any, dy: Any, out: Any = None
    ) -> dict[str, _Shape]:
        """Return gradients of all parameters."""
        return {
            name: (out or {}).get(name, _Shape.of(spec.shape, self._dtype))
            for name, spec in self._specs.items()
        }


class DryLoss:
    """Has a gradient of the shape that the trace of the last layer has, if there is one."""

    def __init__(self, last: Trace | None = None) -> None:
        self._last = last

    def forward(self, x: Any, targets: Any) -> tuple[float, int, Any]:
        """Return one sample."""
        return 0.0, 1, None

    def backward(self, saved: Any, scale: float) -> Any:
        """Return the gradient."""
        return 0.0 if self._last is None else Arrays().make(self._last.dy)

"""What layers take, give and keep, as arrays without contents: memory that nobody touches.

Each layer runs once forward and backward on a sample. From then on its shapes are known, which of
its arrays lie in the same memory, and how: the engine's own code can run on arrays of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import kind_of_wrapped, shared_array
from pycoll.parallel.engine.blocks import mapped
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.precision import cast
from pycoll.parallel.state.layout import Parameter, Unit
from pycoll.parallel.state.values import first_value


@dataclass(frozen=True)
class _Leaf:
    """An array: its number, the number and size of the memory it lies in, and where in that."""

    number: int
    owner: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class Trace(NamedTuple):
    """A layer on a sample: trees with `_Leaf` in place of arrays.

    Attributes:
        x: The input.
        y: The output.
        kept: What the forward pass keeps.
        dy: The gradient of the output.
        used: `kept` as the backward pass to the input leaves it.
        dx: The gradient of the input.
    """

    x: Any
    y: Any
    kept: Any
    dy: Any
    used: Any
    dx: Any


class Arrays:
    """Arrays without contents, by the numbers of their leaves and of the memory they lie in."""

    def __init__(self) -> None:
        self._found: dict[int, np.ndarray] = {}
        self._owners: dict[int, np.ndarray] = {}

    def bind(self, tree: Any, arrays: Any) -> Any:
        """Let leaves be arrays that are there already; make what is not. Return the arrays."""
        leaves, found = _parts(tree), _parts(arrays)
        for leaf, x in zip(leaves, found, strict=False):
            if isinstance(leaf, _Leaf) and type(x) is np.ndarray:
                self._found[leaf.number] = x
                if type(x.base) is np.ndarray and x.base.nbytes == leaf.nbytes:
                    self._owners[leaf.owner] = x.base
        return self.make(tree)

    def make(self, tree: Any) -> Any:
        """Return a tree of arrays for one of leaves."""
        return mapped(tree, lambda x: self._array(x) if isinstance(x, _Leaf) else x)

    def _array(self, leaf: _Leaf) -> np.ndarray:
        if leaf.number not in self._found:
            if (owner := self._owners.get(leaf.owner)) is None:
                owner = self._owners[leaf.owner] = np.empty(leaf.nbytes, np.uint8)
            place = leaf.shape, leaf.dtype, owner, leaf.offset, leaf.strides
            self._found[leaf.number] = np.ndarray(*place)
        return self._found[leaf.number]


def _parts(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(tree, found.append)
    return found


class _Numbers:
    """Numbers of arrays, all of which it keeps: those of NumPy, and those that are wrapped."""

    def __init__(self, wrapped: type | None) -> None:
        self._arrays: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._wrapped = wrapped

    def leaves(self, arrays: Any) -> Any:
        """Return a tree of leaves for one of arrays."""
        return mapped(arrays, self._leaf)

    def _leaf(self, given: Any) -> Any:
        x = given if type(given) is np.ndarray else shared_array(given, self._wrapped)
        if x is None or x.dtype.hasobject:
            return given
        owner = x.base if type(x.base) is np.ndarray else x
        offset = x.ctypes.data - owner.ctypes.data
        lies = self._number(owner), owner.nbytes, offset
        return _Leaf(self._number(x), *lies, x.shape, x.strides, x.dtype)

    def _number(self, x: Any) -> int:
        key = x.ctypes.data, x.nbytes, x.shape, x.strides, x.dtype
        return self._arrays.setdefault(key, (len(self._arrays), x))[0]


def traced(units: Sequence[Unit], sample: Sample, options: Options) -> list[Trace]:
    """Run all layers on the inputs of a sample, one after the other, with their first parameters.

    Raises:
        ArgumentError: If a layer cannot.
    """
    kind = options.recipe.compute or options.recipe.parameter
    specs = {name: spec for unit in units for name, spec in unit.specs.items()}
    x, found = cast(sample[0], kind), list[Trace]()
    for unit in units:
        params = {
            local: options.wrap(cast(first_value(Parameter(full, specs[full])), kind))
            for local, full in unit.names.items()
        }
        try:
            x, trace = _trace(unit.layer, params, x, options)
        except Exception as error:
            raise ArgumentError(f"sample: layer {unit.name}: {error}") from error
        found.append(trace)
    return found


def _trace(layer: Any, params: Any, x: Any, options: Options) -> tuple[Any, Trace]:
    """Return the output of a layer, and its trace."""
    numbers = _Numbers(kind_of_wrapped(options.wrap))
    y, kept = layer.forward(params, x)
    forget = getattr(layer, "forget", None) if options.recompute == "selective" else None
    kept = kept if forget is None else forget(kept)
    before = [numbers.leaves(each) for each in (x, y, kept)]
    dy = mapped(y, lambda each: each * 1 if hasattr(each, "shape") else each)
    dx = layer.backward_input(params, kept, dy)
    return y, Trace(*before, *(numbers.leaves(each) for each in (dy, kept, dx)))

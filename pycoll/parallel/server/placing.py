"""Which parameters there are, in which buckets they lie, and which server has which bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.engine.options import Options
from pycoll.parallel.nn.layer import ParameterSpec, Sequential
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.layout import Layout, Parameter, make_units, unit_parameters

_LAYER = "given"


class _Held:
    """A layer that has arrays as parameters, and computes nothing."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return a specification for each array."""
        return {
            name: ParameterSpec(x.shape, x.dtype.name, init=lambda shape, x=x: x)
            for name, x in self._arrays.items()
        }


@dataclass(frozen=True)
class Form:
    """How a program gives and gets parameters: a model's by name, arrays by name, or one vector.

    Attributes:
        model: A chain of layers, for buckets.
        precision: Name of the number format of parameters and gradients, if arrays were given.
        names: Shapes of arrays that were given by name.
        shape: Shape of the only array, if one was given.
    """

    model: Any
    precision: str | None = None
    names: dict[str, tuple[int, ...]] | None = None
    shape: tuple[int, ...] | None = None

    def flat(self, given: Any) -> dict[str, np.ndarray]:
        """Return a gradient, as a program gives it, by full names of parameters.

        Raises:
            ArgumentError: If it is no array of the shape, or no dictionary.
        """
        if self.shape is not None:
            x = np.asarray(given)
            if x.dtype.hasobject:
                raise ArgumentError(
                    f"the gradient is {kind_of(given)}; expected an array of shape {self.shape}"
                )
            if x.shape != self.shape:
                raise ArgumentError(
                    f"the gradient has shape {x.shape}; the parameters have {self.shape}"
                )
            return _pieces(x.reshape(-1), [p.shape[0] for p in self._specs.values()])
        if not isinstance(given, Mapping):
            raise ArgumentError(f"the gradient is {kind_of(given)}; expected arrays by name")
        head = f"{_LAYER}." if self.names is not None else ""
        return {f"{head}{name}": np.asarray(x) for name, x in given.items()}

    def shaped(self, found: Mapping[str, np.ndarray]) -> Any:
        """Return parameters, given by full names, in the form of the program."""
        if self.shape is not None:
            pieces = [found[name].reshape(-1) for name in self._specs]
            return np.concatenate(pieces).reshape(self.shape)
        if self.names is not None:
            return {name: found[f"{_LAYER}.{name}"] for name in self.names}
        return dict(found)

    @property
    def _specs(self) -> dict[str, ParameterSpec]:
        return {f"{_LAYER}.{n}": p for n, p in self.model.layers[0][1].parameters().items()}


def form_of(given: Any, servers: int, bucket_bytes: int) -> Form:
    """Return the form of a model, an array or a dictionary of arrays.

    An array is cut into pieces of at most `bucket_bytes`, at least one for each server.

    Raises:
        ArgumentError: For arrays that are not all float32 or all float64, or are empty.
    """
    arrays = {"": given} if isinstance(given, np.ndarray) else given
    if not isinstance(arrays, Mapping):
        if not hasattr(given, "layers"):
            raise ArgumentError(
                f"the model is {kind_of(given)}; expected a chain of named layers, such as "
                "Sequential([(name, layer), ...]), a NumPy array, or arrays by name"
            )
        return Form(given)
    kinds = {
        x.dtype.name if isinstance(x, np.ndarray) else type(x).__name__ for x in arrays.values()
    }
    if len(kinds) != 1 or kinds - {"float32", "float64"}:
        found = ", ".join(sorted(kinds)) or "no arrays"
        raise ArgumentError(f"the parameters are {found}; expected float32 or float64, all alike")
    if empty := [name for name, x in arrays.items() if x.size == 0]:
        raise ArgumentError(f"an array without elements: {', '.join(empty) or given.shape}")
    precision = {"float32": "fp32", "float64": "fp64"}[kinds.pop()]
    if isinstance(given, np.ndarray):
        most = max(1, bucket_bytes // given.itemsize)
        count = min(given.size, max(servers, -(-given.size // most)))
        ends = [given.size * i // count for i in range(count + 1)]
        pieces = _pieces(given.reshape(-1), np.diff(ends).tolist())
        held = _Held({name.removeprefix(f"{_LAYER}."): x for name, x in pieces.items()})
        return Form(Sequential([(_LAYER, held)]), precision, shape=given.shape)
    held, names = _Held(arrays), {name: x.shape for name, x in arrays.items()}
    return Form(Sequential([(_LAYER, held)]), precision, names)


def _pieces(flat: np.ndarray, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Return neighbouring parts of a vector by the full names of parameters."""
    ends = np.cumsum(sizes).tolist()
    return {
        f"{_LAYER}.{i}": flat[end - size : end]
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }


def lay_out(model: Any, options: Options, servers: int) -> tuple[Options, list[Layout]]:
    """Cut the parameters of a model into buckets, at least one for each server.

    Returns:
        The options, maybe with smaller buckets, and the layouts.

    Raises:
        ArgumentError: If there are too few parameters for so many servers.
    """
    owned = unit_parameters(make_units(model))
    total = sum(parameter.size for group in owned for parameter in group)
    share = -(-total // servers) * dtype_of(options.recipe.gradient).itemsize
    options = replace(options, bucket_bytes=max(1, min(options.bucket_bytes, share)))
    layouts = options.layouts(owned, 1)
    if len(layouts) < servers:
        raise ArgumentError(
            f"servers={servers}, but the parameters make {len(layouts)} buckets: a parameter is "
            "not divided; use fewer servers"
        )
    return options, layouts


def spread(layouts: Sequence[Layout], servers: int) -> list[int]:
    """Return the number of the server of each bucket: large ones first, to who has least."""
    loads, owners = [0] * servers, [0] * len(layouts)
    for b in sorted(range(len(layouts)), key=lambda b: (-layouts[b].count, b)):
        owners[b] = loads.index(min(loads))
        loads[owners[b]] += layouts[b].count
    return owners


def parameters_of(layouts: Sequence[Layout]) -> list[Parameter]:
    """Return the parameters of buckets."""
    return [entry.parameter for layout in layouts for entry in layout.entries]

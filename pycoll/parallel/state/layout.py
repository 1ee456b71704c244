"""From a model to units and flat layouts: which parameter lies where, without any memory yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.nn.layer import Layer, Model, ParameterSpec, takes_out

ALIGN = 16
"""Shards are a multiple of this many elements: 64 bytes in float32."""


@dataclass(frozen=True)
class Parameter:
    """A parameter with its place in the model."""

    name: str  # in full, ``"layer.name"``
    spec: ParameterSpec
    uses: int = 1  # number of layers that use it: more than one if others are tied to it

    @property
    def size(self) -> int:
        """Number of elements on this rank."""
        return prod(self.spec.shape)


@dataclass(frozen=True)
class Unit:
    """A layer, and the full names of its parameters by their names in the layer."""

    name: str
    layer: Layer
    names: dict[str, str]  # of tied parameters: of those they are tied to
    takes_out: bool  # whether it can write gradients to given arrays

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Specifications of its parameters, by full names of its own."""
        return {f"{self.name}.{local}": p for local, p in self.layer.parameters().items()}


@dataclass(frozen=True)
class Entry:
    """A parameter in a flat vector: elements [start, stop)."""

    parameter: Parameter
    start: int
    stop: int

    def view(self, data: Any) -> Any:
        """Return the parameter, in its shape, as a view of the vector."""
        return data[self.start : self.stop].reshape(self.parameter.spec.shape)


@dataclass(frozen=True)
class Layout:
    """The parameters of one bucket, one after the other in a flat vector."""

    entries: tuple[Entry, ...]
    count: int  # of elements
    padded: int  # the same, rounded up so that all shards are equal and aligned

    def runs(self, lo: int, hi: int) -> Iterator[tuple[int, int, Entry]]:
        """Yield the parts of entries in [lo, hi): start, stop and entry. Padding is in none."""
        for entry in self.entries:
            start, stop = max(lo, entry.start), min(hi, entry.stop)
            if start < stop:
                yield start, stop, entry


def make_units(model: Model) -> list[Unit]:
    """Return the layers of a model as units.

    Raises:
        ArgumentError: If it is no chain of named layers, or two layers or parameters have the same
            name.
    """
    units, seen, owners = [], set(), dict[str, str]()
    for name, layer in _layers(model):
        if name in seen:
            raise ArgumentError(f"two layers of the model are named {name!r}")
        seen.add(name)
        names = {local: f"{name}.{local}" for local in layer.parameters()}
        for local, spec in layer.parameters().items():
            if (other := owners.setdefault(names[local], name)) != name:
                raise ArgumentError(
                    f"layers {other!r} and {name!r} both have a parameter of the full name "
                    f"{names[local]}; give one of them another name"
                )
            names[local] = spec.tied_to or names[local]
        units.append(Unit(name, layer, names, takes_out(layer)))
    return units


def _layers(model: Model) -> Iterator[tuple[str, Layer]]:
    """Yield the entries of a chain after checking that it is one."""
    expected = "expected a chain of named layers, such as Sequential([(name, layer), ...])"
    if not hasattr(model, "layers"):
        raise ArgumentError(f"the model is {kind_of(model)}; {expected}")
    for i, entry in enumerate(model.layers):
        pair = isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)
        if not pair or isinstance(entry[1], type) or not hasattr(entry[1], "parameters"):
            raise ArgumentError(f"layer {i} of the model is {entry!r}; {expected}")
        yield entry[0], entry[1]


def unit_parameters(units: Sequence[Unit]) -> list[list[Parameter]]:
    """Return the parameters that each unit owns; tied ones belong to the unit they are tied to.

    Raises:
        ArgumentError: If a parameter is tied to none, to one of another shape, or to one that is
            split over ``tp`` in another way.
    """
    specs = {name: spec for unit in units for name, spec in unit.specs.items()}
    uses = dict.fromkeys(specs, 0)
    for name, spec in specs.items():
        owner = specs.get(spec.tied_to or name)
        if owner is None or owner.tied_to:
            raise ArgumentError(f"parameter {name} is tied to {spec.tied_to}, which owns no values")
        if owner.shape != spec.shape:
            raise ArgumentError(
                f"parameter {name} has shape {spec.shape}, but {spec.tied_to}, which it is tied "
                f"to, has shape {owner.shape}"
            )
        for what in ("tensor_axis", "sequence"):
            mine, theirs = getattr(spec, what), getattr(owner, what)
            if mine != theirs:
                raise ArgumentError(
                    f"parameter {name} has {what}={mine}, but {spec.tied_to}, which it is tied to, "
                    f"has {what}={theirs}"
                )
        uses[spec.tied_to or name] += 1
    return [
        [Parameter(name, p, uses[name]) for name, p in unit.specs.items() if not p.tied_to]
        for unit in units
    ]


def lay_out(parameters: Sequence[Parameter], shards: int) -> Layout:
    """Put parameters one after the other and pad the vector to equal, aligned shards."""
    entries, at = [], 0
    for parameter in parameters:
        entries.append(Entry(parameter, at, at + parameter.size))
        at += parameter.size
    grain = shards * ALIGN
    return Layout(tuple(entries), at, -(-at // grain) * grain)


def bucket_elements(zero: int, bucket_bytes: int, itemsize: int) -> int | None:
    """Return the elements of a bucket of so many bytes; None: one bucket for each layer."""
    return None if zero == 3 else max(1, bucket_bytes // itemsize)


def make_layouts(
    parameters: Sequence[Sequence[Parameter]], shards: int, elements: int | None
) -> list[Layout]:
    """Cut the parameters of each unit, in forward order, into buckets that are divided into shards.

    Buckets are filled in reverse order, in which gradients arrive, with at most so many elements; a
    larger parameter has a bucket of its own. None: one bucket for each unit.
    """
    if elements is None:
        return [lay_out(owned, shards) for owned in reversed(parameters) if owned]
    layouts, group, size = [], [], 0
    for owned in reversed(parameters):
        for parameter in reversed(owned):
            if group and size + parameter.size > elements:
                layouts.append(lay_out(group, shards))
                group, size = [], 0
            group.append(parameter)
            size += parameter.size
    return [*layouts, lay_out(group, shards)] if group else layouts

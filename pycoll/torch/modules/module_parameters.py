"""The parameters of a PyTorch module: which are trained, how they are split, views of buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pycoll.errors import ArgumentError
from pycoll.parallel.nn.layer import ParameterSpec, Sequential
from pycoll.torch.tensor_parallel import LayerModule

Part = tuple[str, torch.Tensor, torch.Tensor]
"""Full name of a parameter, the parameter, and its elements in a bucket as a flat view."""


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters to train by name; one that is used twice has its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def full_name(name: str) -> str:
    """Return the name of a parameter in `chain_of`: ``"layer.name"`` even without a layer.

    A layer that is itself called "module" goes one deeper, so that no two names are the same.
    """
    outer, dot, _ = name.partition(".")
    return name if dot and outer != "module" else f"module.{name}"


def precision_of(module: torch.nn.Module) -> str:
    """Return the precision of a module's parameters; refuse several, and devices."""
    known = {torch.float32: "fp32", torch.float64: "fp64"}
    kinds = {p.dtype for p in trainable(module).values()}
    if len(kinds) != 1 or not kinds <= known.keys():
        found = ", ".join(sorted(map(str, kinds))) or "none"
        raise ArgumentError(f"parameters are {found}; accepted: all float32, or all float64")
    for name, p in trainable(module).items():
        if p.device.type != "cpu":
            raise ArgumentError(f"parameter {name} is on {p.device}; accepted: cpu")
    return known[kinds.pop()]


def layer_specs(module: torch.nn.Module) -> dict[torch.Tensor, ParameterSpec]:
    """Return the specs of the parameters of a module's `LayerModule`s."""
    found: dict[torch.Tensor, ParameterSpec] = {}
    for part in module.modules():
        if isinstance(part, LayerModule):
            for name, spec in part.specs.items():
                found.setdefault(part.get_parameter(name), spec)
    return found


def chain_of(module: torch.nn.Module) -> Sequential:
    """Return the parameters of a module, by submodule, as layers that are never run.

    A `LayerModule` splits its parameters, and lets them decay, as its layer says. Its gradients are
    complete: where ranks see part of a sequence, it has summed them itself.

    Raises:
        ArgumentError: If they are of several types, or on another device than the CPU.
    """
    precision_of(module)
    known, groups = layer_specs(module), defaultdict[str, dict[str, ParameterSpec]](dict)
    for name, p in trainable(module).items():
        owner, _, local = full_name(name).rpartition(".")
        value = p.detach().numpy()
        groups[owner][local] = replace(
            known.get(p, ParameterSpec(())),
            shape=value.shape,
            dtype=str(value.dtype),
            init=lambda _, p=p: p.detach().numpy(),  # no copy: the caller makes one
            sequence=False,
        )
    return Sequential([(owner, _Holder(specs)) for owner, specs in groups.items()])


class _Holder:
    """The parameters of one submodule, as a layer that is never run."""

    def __init__(self, specs: dict[str, ParameterSpec]) -> None:
        self._specs = specs

    def parameters(self) -> dict[str, ParameterSpec]:
        return self._specs


def part_of(name: str, p: torch.Tensor, elements: np.ndarray) -> Part:
    """Make a parameter a view of elements of a bucket, whose values it takes."""
    view = torch.from_numpy(elements)
    p.data = view.view(p.shape)
    return name, p, view


@dataclass(frozen=True)
class Views:
    """The parameters that are views of buckets; users may have moved them.

    Attributes:
        owner: "engine" or "optimizer", which trains them.
        module: It has them, and may have got others.
        frozen: By name, those that were frozen when it was made; they have no bucket.
        parts: The others.
    """

    owner: str
    module: torch.nn.Module
    frozen: Mapping[str, torch.Tensor]
    parts: Sequence[Part]

    def problem(self) -> str:
        """Return why this rank cannot go on; nothing if it can."""
        if thawed := [name for name, p in self.frozen.items() if p.requires_grad]:
            return (
                f"parameters {', '.join(thawed)}, frozen when the {self.owner} was made; make a "
                "new one"
            )
        known = {id(p) for p in self.frozen.values()} | {id(p) for _, p, _ in self.parts}
        if new := [name for name, p in trainable(self.module).items() if id(p) not in known]:
            return (
                f"parameters {', '.join(new)}, added or replaced after the {self.owner} was made; "
                "make a new one"
            )
        for name, p, view in self.parts:
            if p.dtype != view.dtype or p.numel() != view.numel() or not p.is_cpu:
                return (
                    f"parameter {name} of type {p.dtype} with {p.numel()} elements on {p.device}, "
                    f"expected {view.dtype}, {view.numel()} and cpu, as at the start"
                )
        return ""

    def move_back(self) -> None:
        """Make parameters views of the buckets again, with their values; needs no `problem`.

        They lie elsewhere after ``p.data = ...`` or ``module.to(memory_format=...)``.
        """
        for _, p, view in self.parts:
            if p.data_ptr() != view.data_ptr() or not p.is_contiguous():
                own = view.view(p.shape)
                own.copy_(p.detach())
                p.data = own

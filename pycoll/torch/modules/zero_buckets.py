"""The buckets of `ZeroOptimizer`: where parameters and gradients lie; how states are divided."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import own_block
from pycoll.torch.modules.module_parameters import Part, part_of

State = dict[str, Any]
"""What an optimizer keeps of one parameter: ``{"step": tensor(3.), "exp_avg": ...}``."""


@dataclass
class Flat:
    """One bucket: parameters and gradients in full, and this rank's block of both.

    Attributes:
        layout: Which parameter lies where.
        parts: The parameters and their elements of `parameter`, in the order of the layout.
        parameter: All elements of the parameters.
        gradient: All elements of this rank's gradients.
        shard: This rank's block of `parameter`.
        shard_gradient: This rank's block of the averaged gradient.
    """

    layout: Layout
    parts: list[Part]
    parameter: np.ndarray
    gradient: np.ndarray
    shard: torch.Tensor
    shard_gradient: np.ndarray

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters, in the order of the layout."""
        return [p for _, p, _ in self.parts]

    def point(self, keep: bool) -> None:
        """Make gradients views of the bucket: copy what lies elsewhere; what is missing is 0."""
        for p, entry in zip(self.params, self.layout.entries, strict=True):
            part = self.gradient[entry.start : entry.stop]
            view, grad = torch.from_numpy(part).view(p.shape), p.grad if keep else None
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.to_dense()
            if grad is not None and grad.data_ptr() == view.data_ptr():
                continue
            part[...] = 0 if grad is None else grad.numpy().reshape(-1)
            p.grad = view

    def gather(self, state: Mapping[str, Any], channel: Channel) -> list[State]:
        """Return the states of the parameters from those of all ranks' blocks; a collective."""
        states: list[State] = [{} for _ in self.params]
        for key, value in state.items():
            divided = isinstance(value, torch.Tensor) and value.shape == self.shard.shape
            if divided:
                full = torch.empty(self.layout.padded, dtype=value.dtype)
                channel.all_gather(_bytes(value), _bytes(full), "state").wait()
            for of_one, p, entry in zip(states, self.params, self.layout.entries, strict=True):
                part = full[entry.start : entry.stop].view(p.shape) if divided else value
                of_one[key] = copy.deepcopy(part) if part is value else part.clone()
        return states

    def cut(self, states: Sequence[State], divided: set[str], channel: Channel) -> State:
        """Return the state of this rank's block from those of the parameters.

        A parameter without any has zeros: its gradient was always zero.

        Args:
            states: Of each parameter.
            divided: Names of what has a value for each element.
            channel: The ranks.

        Raises:
            ArgumentError: If the states do not fit the parameters, or are not alike.
        """
        size, block = self.shard.numel(), {}
        known = [(i, state) for i, state in enumerate(states) if state]
        names = [entry.parameter.name for entry in self.layout.entries]
        for i, state in known:
            first, of_first = known[0]
            for key in state.keys() | of_first.keys():
                if key in divided:
                    _check_size(names[i], key, state.get(key), self.params[i])
                elif not _alike(key, state, of_first):
                    raise ArgumentError(
                        f"the state was not loaded: {key} of {names[first]} is "
                        f"{of_first.get(key)}, of {names[i]} {state.get(key)}; parameters of one "
                        "bucket are stepped as one (with bucket_bytes=1 each has its own)"
                    )
        lo = channel.rank * size
        for key, value in known[0][1].items() if known else ():
            if key not in divided:
                block[key] = copy.deepcopy(value)
                continue
            block[key] = torch.zeros(size, dtype=value.dtype)
            by_entry = dict(zip(self.layout.entries, states, strict=True))
            for start, stop, entry in self.layout.runs(lo, lo + size):
                if of_one := by_entry[entry]:
                    part = of_one[key].reshape(-1)[start - entry.start : stop - entry.start]
                    block[key][start - lo : stop - lo] = part
        return block


def make_flat(
    layout: Layout, params: Mapping[str, torch.Tensor], dtype: np.dtype, channel: Channel
) -> Flat:
    """Move parameters into a bucket, with the values of rank 0; a collective."""
    rank, n = channel.rank, channel.world_size
    parameter, gradient = (
        channel.empty(layout.padded, dtype, what) for what in ("parameter", "gradient")
    )
    parameter[...] = gradient[...] = 0
    parts = []
    for entry in layout.entries:
        name, elements = entry.parameter.name, parameter[entry.start : entry.stop]
        elements[...] = params[name].detach().numpy().reshape(-1)
        parts.append(part_of(name, params[name], elements))
    channel.comm.broadcast(parameter, out=parameter)
    shard = torch.from_numpy(own_block(parameter, rank, n))
    reduced = channel.empty(layout.padded // n, dtype, "gradient")
    flat = Flat(layout, parts, parameter, gradient, shard, reduced)
    flat.point(keep=False)
    return flat


def divided_names(states: Iterable[tuple[torch.Tensor, State]]) -> set[str]:
    """Tell which of the states of parameters have a value for each element, unlike counters.

    Where all parameters have no axis, neither has either; then only "step" is a counter.
    """
    pairs = [(p, key, x) for p, state in states for key, x in state.items()]
    scalars = all(p.ndim == 0 for p, _, _ in pairs)
    return {
        key
        for _, key, x in pairs
        if isinstance(x, torch.Tensor) and (x.ndim or (scalars and key != "step"))
    }


def _bytes(x: torch.Tensor) -> np.ndarray:
    """Look at a vector of any type, also of those that NumPy lacks, as bytes."""
    return x.detach().contiguous().view(torch.uint8).numpy()


def _check_size(name: str, key: str, value: Any, p: torch.Tensor) -> None:
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
    if found != tuple(p.shape):
        raise ArgumentError(
            f"the state was not loaded: {key} of {name} is {found}, expected shape {tuple(p.shape)}"
        )


def _alike(key: str, one: State, other: State) -> bool:
    return key in one and key in other and bool(one[key] == other[key])

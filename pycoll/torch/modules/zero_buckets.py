"""The buckets of `ZeroOptimizer`: flat parameters and gradients, and how states are sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycoll.errors import ArgumentError, in_words
from pycoll.parallel.channels import Channel
from pycoll.parallel.settings import describe
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import own_block
from pycoll.torch.modules.module_parameters import Part, part_of

State = dict[str, Any]
"""What an optimizer keeps of one parameter: ``{"step": tensor(3.), "exp_avg": ...}``."""

Group = Mapping[str, Any]


@dataclass
class ZeroBucket:
    """One bucket: parameters and gradients in full, and this rank's shard of both."""

    layout: Layout
    parts: list[Part]  # in the order of the layout
    parameter: np.ndarray
    gradient: np.ndarray  # of this rank
    shard: torch.Tensor  # of `parameter`
    shard_gradient: np.ndarray  # of the averaged gradient

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters, in the order of the layout."""
        return [p for _, p, _ in self.parts]

    def view_gradients(self, keep: bool) -> None:
        """Make gradients views of the bucket, with their values (`keep`) or zeros."""
        for p, entry in zip(self.params, self.layout.entries, strict=True):
            part = self.gradient[entry.start : entry.stop]
            view, grad = torch.from_numpy(part).view(p.shape), p.grad if keep else None
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.to_dense()
            if grad is not None and grad.data_ptr() == view.data_ptr():
                continue
            part[...] = 0 if grad is None else grad.numpy().reshape(-1)
            p.grad = view

    def not_finite(self) -> list[str]:
        """Return the parameters whose gradient on this rank is not finite."""
        return [name for name, p, _ in self.parts if not p.grad.isfinite().all()]

    def gather(self, state: Mapping[str, Any], channel: Channel) -> list[State]:
        """Return the states of the parameters from those of all shards; a collective."""
        states: list[State] = [{} for _ in self.params]
        for key, value in state.items():
            sharded = isinstance(value, torch.Tensor) and value.shape == self.shard.shape
            if sharded:
                full = torch.empty(self.layout.padded, dtype=value.dtype)
                channel.all_gather(_bytes(value), _bytes(full), "state").wait()
            for of_one, p, entry in zip(states, self.params, self.layout.entries, strict=True):
                part = full[entry.start : entry.stop].view(p.shape) if sharded else value
                of_one[key] = copy.deepcopy(part) if part is value else part.clone()
        return states

    def shard_states(self, states: Sequence[State], sharded: set[str], channel: Channel) -> State:
        """Return the state of this rank's shard from those of the parameters.

        A parameter without any has zeros: its gradient was always zero. `sharded` names what has a
        value for each element.
        """
        size, shard = self.shard.numel(), {}
        known = [(i, state) for i, state in enumerate(states) if state]
        names = [entry.parameter.name for entry in self.layout.entries]
        for i, state in known:
            first, of_first = known[0]
            for key in state.keys() | of_first.keys():
                if key in sharded:
                    _check_size(names[i], key, state.get(key), self.params[i])
                elif key not in state or key not in of_first or bool(state[key] != of_first[key]):
                    raise ArgumentError(
                        f"the state was not loaded: {key} of {names[first]} is "
                        f"{of_first.get(key)}, of {names[i]} {state.get(key)}; parameters of one "
                        "bucket are stepped as one (with bucket_bytes=1 each has its own)"
                    )
        lo = channel.rank * size
        for key, value in known[0][1].items() if known else ():
            if key not in sharded:
                shard[key] = copy.deepcopy(value)
                continue
            shard[key] = torch.zeros(size, dtype=value.dtype)
            by_entry = dict(zip(self.layout.entries, states, strict=True))
            for start, stop, entry in self.layout.runs(lo, lo + size):
                if of_one := by_entry[entry]:
                    part = of_one[key].reshape(-1)[start - entry.start : stop - entry.start]
                    shard[key][start - lo : stop - lo] = part
        return shard


def make_bucket(
    layout: Layout, params: Mapping[str, torch.Tensor], dtype: np.dtype, channel: Channel
) -> ZeroBucket:
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
    channel.comm.broadcast(parameter)
    shard = torch.from_numpy(own_block(parameter, rank, n))
    reduced = channel.empty(layout.padded // n, dtype, "gradient")
    bucket = ZeroBucket(layout, parts, parameter, gradient, shard, reduced)
    bucket.view_gradients(keep=False)
    return bucket


def sharded_names(
    states: Iterable[tuple[torch.Tensor, State]],
    make: Callable[[torch.Tensor], torch.optim.Optimizer],
) -> set[str]:
    """Return which of the states of parameters have a value for each element, unlike counters.

    If all parameters are scalars, these have no axis either. What an optimizer of the same kind,
    which `make` makes, keeps of two elements tells then.
    """
    pairs = list(states)
    if pairs and all(p.ndim == 0 for p, _ in pairs):
        two = torch.nn.Parameter(torch.zeros(2, dtype=pairs[0][0].dtype))
        two.grad = torch.zeros_like(two)
        (optimizer := make(two)).step()
        pairs = [(two, optimizer.state[two])]
    return {
        key
        for _, state in pairs
        for key, x in state.items()
        if isinstance(x, torch.Tensor) and x.ndim
    }


def why_not_flat(kind: Callable[..., torch.optim.Optimizer], groups: Iterable[Group]) -> str:
    """Return why an optimizer cannot step vectors of many parameters; nothing if it can.

    With the settings of each group it steps a matrix, and each of its elements alone.
    """
    for group in groups:
        dtype = next((p.dtype for p in group["params"]), torch.float32)
        start = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=dtype)
        gradient = torch.tensor([[0.1, 0.4], [-0.2, 0.3]], dtype=dtype)
        elements = list(zip(start.view(4, 1), gradient.view(4, 1), strict=True))
        settings = hyperparameters(group)
        try:
            whole = _change(kind, settings, start, gradient).flatten()
            alone = torch.cat([_change(kind, settings, *element) for element in elements])
        except Exception as error:  # such as that of LBFGS, which needs a closure
            return in_words(error)
        if not torch.allclose(whole, alone, rtol=1e-3, atol=1e-15):
            return "what it does to an element depends on the others"
    return ""


def _change(
    kind: Callable[..., torch.optim.Optimizer],
    settings: Group,
    start: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Return what two steps of an optimizer add to a parameter."""
    p = torch.nn.Parameter(start.clone())
    p.grad = gradient.clone()
    optimizer = kind([{**settings, "params": [p]}])
    for _ in range(2):
        optimizer.step()
    return p.detach() - start


def part_frozen(
    optimizer: torch.optim.Optimizer, frozen: Iterable[torch.Tensor]
) -> dict[torch.Tensor, State]:
    """Take frozen parameters out of an optimizer; return the states that it has made of them.

    Some optimizers, such as Adagrad, make states of all parameters at once. A frozen one may still
    have a gradient from before, so it must not be stepped.
    """
    gone = set(frozen)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in gone]
    return {p: optimizer.state.pop(p) for p in gone if p in optimizer.state}


def hyperparameters(group: Group) -> dict[str, Any]:
    """Return the settings of a group."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def settings_text(groups: Sequence[Group]) -> str:
    """Return the settings that all ranks must have alike in a step, such as learning rates."""
    return "; ".join(
        ", ".join(
            f"{name}={describe(_numbers(value))}"
            for name, value in sorted(hyperparameters(group).items())
        )
        for group in groups
    )


def _numbers(value: Any) -> Any:
    """Return a setting with numbers in place of tensors, which print rounded."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if type(value) in (tuple, list):
        return type(value)(map(_numbers, value))
    return value


def copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy the settings of one optimizer's groups to those of another."""
    for ours, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update(hyperparameters(ours))


def _bytes(x: torch.Tensor) -> np.ndarray:
    """Return a view of a vector as bytes; its type may be one that NumPy lacks."""
    return x.detach().contiguous().view(torch.uint8).numpy()


def _check_size(name: str, key: str, value: Any, p: torch.Tensor) -> None:
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
    if found != tuple(p.shape):
        raise ArgumentError(
            f"the state was not loaded: {key} of {name} is {found}, expected shape {tuple(p.shape)}"
        )

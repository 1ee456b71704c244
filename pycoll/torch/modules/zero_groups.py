"""The parameter groups of `ZeroOptimizer`: their contents, and what all ranks must have alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel
from pycoll.parallel.compare import check_same
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.settings import describe
from pycoll.torch.modules.module_parameters import layer_specs, trainable

Group = Mapping[str, Any]


def kind_text(kind: Callable[..., Any]) -> str:
    """Name an optimizer's class without its module, which on one rank may be ``__main__``."""
    return getattr(kind, "__qualname__", None) or describe(kind)


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


def hyperparameters(group: Group) -> dict[str, Any]:
    """Return the settings of a group."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy the settings of one optimizer's groups to those of another."""
    for ours, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update(hyperparameters(ours))


def check_groups(
    groups: Sequence[Group], module: torch.nn.Module, facts: Sequence[str], channel: Channel
) -> dict[str, torch.Tensor]:
    """Compare groups over the ranks, then check them; a collective.

    The comparison comes first, so that the checks fail on all ranks or on none. `facts` are further
    settings that have to be the same. Returns the frozen parameters in groups by name.
    """
    names, specs = {p: name for name, p in module.named_parameters()}, layer_specs(module)
    grouped = {p: i for i, group in enumerate(groups) for p in group["params"]}
    missing = {p: name for name, p in trainable(module).items() if p not in grouped}
    lines = [*facts] + [
        f"{group}: {names.get(p, 'not of the module')}, {_kind(p, specs)}"
        for p, group in [(p, f"group {i}") for p, i in grouped.items()]
        + [(p, "no group") for p in missing]
    ]
    check_same(lines, "parameters, groups or settings of ZeroOptimizer", channel)
    if missing:
        raise ArgumentError(f"parameters {', '.join(missing.values())} are in no group")
    if foreign := sum(p not in names for p in grouped):
        raise ArgumentError(f"{foreign} parameters in groups are not of the module")
    split = [names[p] for p in grouped if p.requires_grad and _axis(p, specs) is not None]
    if split:
        raise ArgumentError(
            f"parameters {', '.join(split)} are split over tensor-parallel ranks, which "
            "ZeroOptimizer does not know: each would clip by a norm of its own, and skip steps "
            "alone. Use pycoll.torch.data_parallel.DataParallel(module, loss, mesh), which trains "
            "over dp and tp"
        )
    return {names[p]: p for p in grouped if not p.requires_grad}


def _axis(p: torch.Tensor, specs: Mapping[torch.Tensor, ParameterSpec]) -> int | None:
    return specs[p].tensor_axis if p in specs else None


def _kind(p: torch.Tensor, specs: Mapping[torch.Tensor, ParameterSpec]) -> str:
    """Describe what all ranks must have alike of a parameter, besides its values."""
    trained, axis = "trained" if p.requires_grad else "frozen", _axis(p, specs)
    split = "" if axis is None else f", split along axis {axis}"
    return f"shape {tuple(p.shape)}, {p.dtype} on {p.device}, {trained}{split}"

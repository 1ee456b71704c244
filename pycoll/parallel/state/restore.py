"""A saved state back into an engine: everything is looked at before anything changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.engine.checks import check_same, gather_texts, told_by
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.engine.precision import LossScale
from pycoll.parallel.hooks.hook import Hook
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.layout import Entry


@dataclass
class _Found:
    """What of a saved state is this rank's, in shapes and types that fit.

    Attributes:
        steps: Number of steps taken.
        loss_scale: Scale of the loss in the next step.
        parts: For each bucket the values of parameters and optimizer states, by kind and name.
        facts: All of it in short, a line for each value.
    """

    steps: int
    loss_scale: LossScale
    parts: list[dict[str, dict[str, Any]]]
    facts: list[str]


def restore(
    buckets: Sequence[Bucket], groups: Groups, scale: LossScale, hook: Hook, saved: dict[str, Any]
) -> tuple[int, LossScale]:
    """Take full parameters and states; each rank keeps its part. A collective.

    Args:
        buckets: The buckets to fill.
        groups: The ranks.
        scale: Tells how the loss scale changes; its value is that of `saved`.
        hook: Takes its own part of `saved`.
        saved: What `DataParallel.state_dict` gave.

    Returns:
        Number of steps taken, and the scale of the loss in the next one.

    Raises:
        ArgumentError: On every rank, if the state of any does not fit, naming parameter and rank.
        MismatchError: On every rank, if ranks have different states. Nothing has changed then.
    """
    before, problem, found = hook.state(), "", None
    try:
        found = _look(buckets, groups, scale, saved)
        _load_hook(hook, saved.get("hook", {}), saved.get("hook_of"), groups.place)
    except ArgumentError as error:
        problem = str(error)
    except Exception as error:  # whatever arrays of a user raise: the other ranks wait
        problem = f"{type(error).__name__}: {error}"
    told = told_by(gather_texts(problem, groups.world))
    if told or found is None:
        if found is not None:
            hook.load(before)
        raise ArgumentError(
            f"the saved state was not loaded: {told}. Nothing was changed; load what "
            "state_dict of the same model and optimizer gave"
        )
    try:
        check_same(found.facts, "saved states, so none was loaded", groups.world)
    except MismatchError:
        hook.load(before)
        raise
    for bucket, parts in zip(buckets, found.parts, strict=True):
        bucket.fill(parts["parameters"])
        for name in bucket.slots:
            bucket.fill_slot(name, parts[name])
    return found.steps, found.loss_scale


def _look(
    buckets: Sequence[Bucket], groups: Groups, scale: LossScale, saved: dict[str, Any]
) -> _Found:
    """Find everything in a saved state.

    Raises:
        ArgumentError: Saying what is there instead of what.
    """
    if not isinstance(saved, Mapping):
        raise ArgumentError(f"{saved!r} in place of a dictionary")
    steps = saved.get("steps")
    if not isinstance(steps, (int, np.integer)) or steps < 0:
        raise ArgumentError(f"steps is {steps!r}, expected an integer >= 0")
    pair = saved.get("loss_scale")
    if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:
        raise ArgumentError(f"loss_scale is {pair!r}, expected (value, good steps)")
    scale = replace(scale, value=pair[0], good_steps=pair[1])
    facts = [
        f"steps {int(steps)}",
        f"loss_scale {float(scale.value)}, {scale.good_steps} good steps",
    ]
    parts = [_parts(bucket, groups, saved, facts) for bucket in buckets]
    names = {e.parameter.name for bucket in buckets for e in bucket.layout.entries}
    if unknown := sorted(map(str, saved["parameters"].keys() - names)):
        raise ArgumentError(f"parameters that the model does not have: {', '.join(unknown)}")
    return _Found(int(steps), scale, parts, facts)


def _parts(
    bucket: Bucket, groups: Groups, saved: dict[str, Any], facts: list[str]
) -> dict[str, dict[str, Any]]:
    """Return this rank's part of what was saved of a bucket, by kind and name; extend `facts`."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("parameters", *bucket.slots):
        found[kind] = {}
        for entry in bucket.layout.entries:
            value = np.asarray(_value(saved, kind, entry, groups), order="C")
            digest = hashlib.blake2b(value.reshape(-1).view(np.uint8), digest_size=8).hexdigest()
            name, axis = entry.parameter.name, entry.parameter.spec.tensor_axis
            facts.append(f"{kind} {name} of type {value.dtype} with hash {digest}")
            if axis is not None:
                value = np.split(value, groups.tensor.world_size, axis)[groups.tensor.rank]
            found[kind][name] = value
    return found


def _load_hook(hook: Hook, state: dict[str, Any], saved_by: Any, place: str) -> None:
    if state and saved_by is not None and str(saved_by) != place:
        raise ArgumentError(
            f'a "hook" that was saved by {saved_by}, where this is {place}: load on every rank '
            "what it has saved itself, and on another mesh drop it"
        )
    before = hook.state()
    try:
        hook.load(state)
    except Exception as error:  # whatever a hook of a user does with what it does not know
        hook.load(before)
        name = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"a state that {type(hook).__name__} refuses: {name}") from error


def _value(saved: dict[str, Any], kind: str, entry: Entry, groups: Groups) -> np.ndarray:
    """Return one saved parameter or state of it in full."""
    name, spec = entry.parameter.name, entry.parameter.spec
    group = saved.get(kind)
    if not isinstance(group, Mapping) or name not in group:
        raise ArgumentError(f"no {kind} of parameter {name}")
    try:
        value = np.asarray(group[name])
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's: it requires grad
        raise ArgumentError(f"{name} in {kind} is no array: {error}") from error
    shape = list(spec.shape)
    if spec.tensor_axis is not None:
        shape[spec.tensor_axis] *= groups.tensor.world_size
    if value.shape != tuple(shape):
        raise ArgumentError(f"parameter {name} has shape {tuple(shape)}, saved is {value.shape}")
    if value.dtype.kind not in "fiu" and value.dtype.name != "bfloat16":
        raise ArgumentError(f"{name} in {kind} has type {value.dtype}, expected real numbers")
    return value

"""Values of buckets: first values, gathered parameters, saved states that fit any mesh.

Loading checks everything on every rank before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.arrays import as_numpy
from pycoll.parallel.channels import Groups
from pycoll.parallel.compare import (
    check_same,
    digest,
    gather_problems,
    name_ranks,
    refuse_first,
)
from pycoll.parallel.precision import LossScale
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Entry, Parameter


def initialise(buckets: Sequence[Bucket], groups: Groups, start: str) -> None:
    """Make the first values of all parameters, bucket by bucket; a collective.

    `start` is ``"check"``, ``"broadcast"`` or ``"trust"``; see `Options`.

    Raises:
        ArgumentError: If an initial value has a wrong shape.
        MismatchError: On every rank, if values differ between ranks that must have the same,
            naming parameter and ranks.
    """
    problem = ""
    for bucket in buckets:
        parameters = [entry.parameter for entry in bucket.layout.entries]
        values = {p.name: first_value(p) for p in parameters}
        if start == "broadcast":
            for parameter in parameters:
                value = values[parameter.name] = values[parameter.name].copy()
                groups.data.comm.broadcast(value)
                if parameter.spec.tensor_axis is None:
                    groups.tensor.comm.broadcast(value)
        elif start == "check":
            found = _different_values(values, parameters, groups)
            problem = problem or found
        bucket.fill(partial(_elements, {"parameters": values}))
    if start == "check":
        refuse_first(problem, groups.world)  # other stages have other parameters


def _elements(values: Mapping[str, Any], kind: str, name: str, start: int, stop: int) -> Any:
    """Return elements of an array by kind and name; None if there is no array of the kind."""
    if kind not in values:
        return None
    return np.asarray(values[kind][name]).reshape(-1)[start:stop]


def first_value(parameter: Parameter) -> np.ndarray:
    """Return what a parameter is at the start.

    Raises:
        ArgumentError: If its initial value has a wrong shape.
    """
    spec = parameter.spec
    if spec.init is None:
        return np.zeros(spec.shape, spec.dtype)
    value = as_numpy(spec.init(spec.shape))
    if value.shape != tuple(spec.shape):
        raise ArgumentError(
            f"parameter {parameter.name} has shape {spec.shape}, its initial value {value.shape}"
        )
    return np.ascontiguousarray(value)


def _different_values(
    values: Mapping[str, Any], parameters: Sequence[Parameter], groups: Groups
) -> str:
    """Describe the first parameter that differs from ranks that must have the same; a collective.

    Only the ranks of its groups may know.
    """
    problem = ""
    for channel, chosen in (
        (groups.data, list(parameters)),
        (groups.tensor, [p for p in parameters if p.spec.tensor_axis is None]),
    ):
        if not chosen:
            continue
        rows = [digest(np.ascontiguousarray(values[p.name])) for p in chosen]
        table = channel.gather_rows(np.concatenate(rows), "check")
        table = table.reshape(channel.world_size, len(chosen), -1)
        for i, parameter in enumerate(chosen):
            seen = [bytes(row) for row in table[:, i]]
            if len(set(seen)) > 1 and not problem:
                usual = max(seen, key=seen.count)
                odd = [rank for rank, found in enumerate(seen) if found != usual]
                problem = (
                    f"parameter {parameter.name} differs at the start: {name_ranks(odd)} of the "
                    f"{channel.name} group of {channel.world_size} not as the others; "
                    f"{_advice(parameter)}"
                )
    return problem


def _advice(parameter: Parameter) -> str:
    same = "make it from the same seed everywhere, or pass start='broadcast'"
    if parameter.spec.tensor_axis is None:
        return same
    return f"its layer has to be split over the mesh's tp axis, not over another; if it is, {same}"


def gather_parameters(buckets: Sequence[Bucket], groups: Groups) -> dict[str, np.ndarray]:
    """Return the parameters as the layers see them, in full."""
    found: dict[str, np.ndarray] = {}
    for bucket in buckets:
        found |= _gather(None, bucket, groups)
    return found


def gradients(buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """Return the sums of gradients that this rank has, as views."""
    return {
        entry.parameter.name: entry.view(bucket.gradients.kept)
        for bucket in buckets
        for entry in bucket.layout.entries
    }


def gather_states(buckets: Sequence[Bucket], groups: Groups) -> dict[str, Any]:
    """Return parameters, in the type in which they are updated, and optimizer states, in full."""
    found: dict[str, Any] = {"parameters": {}}
    for bucket in buckets:
        for kind, vector in bucket.states.items():
            found.setdefault(kind, {}).update(_gather(vector, bucket, groups))
        bucket.evict()
    return found


def _gather(vector: Any, bucket: Bucket, groups: Groups) -> dict[str, np.ndarray]:
    """Return the full arrays in a vector of which this rank has a part; None: the parameters."""
    if vector is None:
        vector = bucket.gather().wait()
    elif vector.shape[0] < bucket.layout.padded:
        vector = groups.shards.gather_rows(as_numpy(vector), "state").reshape(-1)
    return {e.parameter.name: _whole(vector, e, groups) for e in bucket.layout.entries}


def _whole(flat: Any, entry: Entry, groups: Groups) -> np.ndarray:
    """Copy one parameter out of a flat vector, joined over tp."""
    spec, part = entry.parameter.spec, as_numpy(flat[entry.start : entry.stop])
    if spec.tensor_axis is None:
        return part.reshape(spec.shape).copy()
    rows = groups.tensor.gather_rows(np.ascontiguousarray(part), "state")
    return np.concatenate([row.reshape(spec.shape) for row in rows], axis=spec.tensor_axis)


def restore(
    buckets: Sequence[Bucket], groups: Groups, scale: LossScale, hook: Hook, saved: dict[str, Any]
) -> tuple[int, LossScale]:
    """Load full parameters and states; each rank keeps its part. A collective.

    `saved` is the result of `DataParallel.state_dict`; it replaces the values of `scale`.

    Returns:
        Number of steps taken, and the scale of the loss in the next one.

    Raises:
        ArgumentError: On every rank, if the state of any does not fit, naming parameter and rank.
        MismatchError: On every rank, if ranks have different states. Nothing has changed then.
    """
    before, problem, facts, values = hook.state(), "", [], {}
    try:
        steps, scale = _load_counters(scale, saved, facts)
        values = _load_values(buckets, groups, saved, facts)
        _load_hook(hook, saved.get("hook", {}), saved.get("hook_of"), groups.place)
    except ArgumentError as error:
        problem = str(error)
    except Exception as error:  # whatever arrays of a user raise: the other ranks wait
        problem = f"{type(error).__name__}: {error}"
    try:
        if problems := gather_problems(problem, groups.world):
            raise ArgumentError(
                f"the saved state was not loaded: {problems}. Nothing was changed; load what "
                "state_dict of the same model and optimizer gave"
            )
        _check_saved(facts, groups)
    except (ArgumentError, MismatchError):
        hook.load(before)
        raise
    for bucket in buckets:
        bucket.fill(partial(_elements, values))
    return steps, scale


def _check_saved(facts: Sequence[str], groups: Groups) -> None:
    """Compare what the ranks of each stage load; a collective, which raises on all or on none."""
    problem = ""
    try:
        check_same(facts, "saved states, so none was loaded", groups.stage)
    except MismatchError as error:
        problem = str(error)
    refuse_first(problem, groups.world)


def _load_counters(
    scale: LossScale, saved: dict[str, Any], facts: list[str]
) -> tuple[int, LossScale]:
    """Return the number of steps and the loss scale; extend `facts`."""
    if not isinstance(saved, Mapping):
        raise ArgumentError(f"{saved!r} in place of a dictionary")
    steps = saved.get("steps")
    if not isinstance(steps, (int, np.integer)) or steps < 0:
        raise ArgumentError(f"steps is {steps!r}, expected an integer >= 0")
    pair = saved.get("loss_scale", ())
    if pair is not None and not (isinstance(pair, (tuple, list, np.ndarray)) and len(pair) == 2):
        raise ArgumentError(f"loss_scale is {pair!r}, expected (value, good steps) or None")
    scale = scale.resumed(pair)
    facts += [
        f"steps {int(steps)}",
        f"loss_scale {float(scale.value)}, {scale.good_steps} good steps",
    ]
    return int(steps), scale


def _load_values(
    buckets: Sequence[Bucket], groups: Groups, saved: dict[str, Any], facts: list[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Return this rank's part of all parameters and states, by kind and name; extend `facts`."""
    found: dict[str, dict[str, np.ndarray]] = {}
    names = set()
    for bucket in buckets:
        for kind in bucket.states:
            for entry in bucket.layout.entries:
                value = np.asarray(_value(saved, kind, entry, groups), order="C")
                name, axis = entry.parameter.name, entry.parameter.spec.tensor_axis
                hashed = digest(value, 8).tobytes().hex()
                facts.append(f"{kind} {name} of type {value.dtype} with hash {hashed}")
                if axis is not None:
                    value = np.split(value, groups.tensor.world_size, axis)[groups.tensor.rank]
                found.setdefault(kind, {})[name] = value
                names.add(name)
    if unknown := sorted(map(str, saved["parameters"].keys() - names)):
        raise ArgumentError(f"parameters that the model does not have: {', '.join(unknown)}")
    return found


def _load_hook(hook: Hook, state: dict[str, Any], saved_by: Any, place: str) -> None:
    if state and saved_by is not None and str(saved_by) != place:
        raise ArgumentError(
            f'a "hook" that was saved by {saved_by}, where this is {place}: load on every rank '
            "what it has saved itself, and on another mesh drop it"
        )
    try:
        hook.load(state)
    except Exception as error:  # whatever a hook of a user does with an unknown state
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

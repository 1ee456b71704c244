"""Values of buckets: the start, gathered parameters, and states that fit any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import as_numpy
from pycoll.parallel.engine.checks import check_values
from pycoll.parallel.engine.groups import Groups
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.layout import Entry, Parameter


def initialise(buckets: Sequence[Bucket], groups: Groups, start: str) -> None:
    """Make the first values of all parameters, bucket by bucket; a collective.

    Args:
        buckets: The buckets.
        groups: The ranks.
        start: ``"check"``, ``"broadcast"`` or ``"trust"``; see `DataParallel`.

    Raises:
        ArgumentError: If `start` is none of these, or an initial value has a wrong shape.
        MismatchError: If values differ between ranks that must have the same.
    """
    if start not in ("check", "broadcast", "trust"):
        raise ArgumentError(f"start={start!r}; accepted are check, broadcast and trust")
    for bucket in buckets:
        parameters = [entry.parameter for entry in bucket.layout.entries]
        values = {p.name: _first_value(p) for p in parameters}
        if start == "broadcast":
            for parameter in parameters:
                value = values[parameter.name] = values[parameter.name].copy()
                groups.data.comm.broadcast(value, out=value)
                if parameter.spec.tensor_axis is None:
                    groups.tensor.comm.broadcast(value, out=value)
        elif start == "check":
            check_values(values, parameters, groups)
        bucket.fill(values)


def _first_value(parameter: Parameter) -> np.ndarray:
    spec = parameter.spec
    if spec.init is None:
        return np.zeros(spec.shape, spec.dtype)
    value = as_numpy(spec.init(spec.shape))
    if value.shape != tuple(spec.shape):
        raise ArgumentError(
            f"parameter {parameter.name} has shape {spec.shape}, its initial value {value.shape}"
        )
    return np.ascontiguousarray(value)


def gather_parameters(buckets: Sequence[Bucket], groups: Groups) -> dict[str, np.ndarray]:
    """Return what the layers see, in full."""
    found: dict[str, np.ndarray] = {}
    for bucket in buckets:
        flat = bucket.gather().wait()
        for entry in bucket.layout.entries:
            found[entry.parameter.name] = _whole(flat, entry, groups)
    return found


def gradient_views(buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """Return the gradients by name, as views of the vectors that hold all of them."""
    return {
        entry.parameter.name: bucket.view(bucket.gradients.kept, entry)
        for bucket in buckets
        for entry in bucket.layout.entries
    }


def gather_states(buckets: Sequence[Bucket], groups: Groups) -> dict[str, Any]:
    """Return parameters in the type that they are stepped in, and optimizer states, in full."""
    found: dict[str, Any] = {"parameters": {}}
    for bucket in buckets:
        vectors = {"parameters": bucket.master, **bucket.slots}
        for key, vector in vectors.items():
            flat = bucket.gather().wait() if vector is None else _join(vector, bucket, groups)
            for entry in bucket.layout.entries:
                found.setdefault(key, {})[entry.parameter.name] = _whole(flat, entry, groups)
    return found


def _join(vector: Any, bucket: Bucket, groups: Groups) -> Any:
    """Return the full vector of which this rank steps a part."""
    if vector.shape[0] == bucket.layout.padded:
        return vector
    return groups.shards.gather_rows(as_numpy(vector), "state").reshape(-1)


def _whole(flat: Any, entry: Entry, groups: Groups) -> np.ndarray:
    """Copy one parameter out of a flat vector, joined over tp."""
    spec, part = entry.parameter.spec, as_numpy(flat[entry.start : entry.stop])
    if spec.tensor_axis is None:
        return part.reshape(spec.shape).copy()
    rows = groups.tensor.gather_rows(np.ascontiguousarray(part), "state")
    return np.concatenate([row.reshape(spec.shape) for row in rows], axis=spec.tensor_axis)

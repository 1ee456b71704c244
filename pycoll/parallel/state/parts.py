"""The parts of parameters and states that a rank writes to a checkpoint, and reads from one.

A part is a run of elements, in row-major order, of a box of the whole array: the box is what a rank
of ``tp`` holds, the run what a rank of ``dp`` or ``replica`` is responsible for. All ranks together
write every element once; where they lie on another mesh is for the reader to find out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll.parallel.channels import Channel, Groups
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.state.bucket import Bucket

Box = tuple[tuple[int, int], ...]
"""Start and stop along each axis of the whole array."""


class Part(NamedTuple):
    """Elements ``[start, stop)`` of a box of an array, in row-major order."""

    kind: str  # "parameters", or a state of the optimizer
    name: str  # of the parameter, in full
    shape: tuple[int, ...]  # of the whole array
    box: Box
    start: int
    stop: int
    data: Any = None  # ``[stop - start]``; None: elements that a rank wants


def place_of(spec: ParameterSpec, tensor: Channel) -> tuple[tuple[int, ...], Box]:
    """Return the shape of the whole array, and the box of it that this rank of ``tp`` holds."""
    shape, box = list(spec.shape), [(0, count) for count in spec.shape]
    if (axis := spec.tensor_axis) is not None:
        count = shape[axis]
        shape[axis] *= tensor.world_size
        box[axis] = (tensor.rank * count, (tensor.rank + 1) * count)
    return tuple(shape), tuple(box)


def own_parts(buckets: Sequence[Bucket], groups: Groups) -> Iterator[Part]:
    """Yield what this rank writes: views of parameters, in the type that is updated, and states.

    Parameters must have arrived; see `Bucket.complete`.
    """
    for bucket in buckets:
        for kind, vector, first in bucket.vectors():
            if (
                kind == "parameters"
                and vector is bucket.parameter.data
                and bucket.master is not None
            ):
                continue  # the rounded copy of the master weights
            for start, stop, entry in bucket.layout.runs(*bucket.counted(groups)):
                if entry.parameter.spec.tensor_axis is None and groups.tensor.rank > 0:
                    continue  # the first tensor-parallel rank writes what all of them have
                shape, box = place_of(entry.parameter.spec, groups.tensor)
                run = start - entry.start, stop - entry.start
                data = vector[start - first : stop - first]
                yield Part(kind, entry.parameter.name, shape, box, *run, data)


def wanted_parts(buckets: Sequence[Bucket], groups: Groups) -> Iterator[Part]:
    """Yield what this rank reads, without data."""
    for bucket in buckets:
        for kind, vector, first in bucket.vectors():
            for start, stop, entry in bucket.layout.runs(first, first + vector.shape[0]):
                shape, box = place_of(entry.parameter.spec, groups.tensor)
                run = start - entry.start, stop - entry.start
                yield Part(kind, entry.parameter.name, shape, box, *run)


def hook_kind(place: str, buckets: Sequence[Bucket]) -> str:
    """Return the kind of the arrays that a rank's hook has not sent: they fit its buckets alone."""
    cuts = [
        (b.layout.entries[0].parameter.name, b.layout.padded, str(b.gradients.kept.dtype))
        for b in buckets
    ]
    return f"hook of {place}, buckets {zlib.crc32(repr(cuts).encode()):08x}"


def hook_parts(state: Mapping[str, Any], kind: str) -> Iterator[Part]:
    """Yield the arrays of a rank's hook, each in full."""
    for name, array in state.items():
        flat = np.asarray(array).reshape(-1)
        box = tuple((0, count) for count in array.shape)
        yield Part(kind, name, array.shape, box, 0, flat.size, flat)

"""Tensor parallelism: the collectives where an activation enters or leaves the split layers.

Each boundary is a pair of a forward and a backward function, the adjoint of the other. ``f`` and
``g`` of Megatron-LM are COPY and REDUCE (Shoeybi et al., arXiv 1909.08053, section 3); the pairs of
sequence parallelism replace each all-reduce by a reduce-scatter and an all-gather
(Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, namespace
from pycoll.parallel.channels import LayerComm

SEQUENCE, FEATURES = 1, -1  # axes of an activation [b, s, h]


def keep(x: Array, comm: LayerComm) -> Array:
    """Return the array itself."""
    return x


def all_reduce(x: Array, comm: LayerComm) -> Array:
    """Return the sum over ranks."""
    return x if comm.world_size == 1 else comm.all_reduce(x)


def all_gather(x: Array, comm: LayerComm, axis: int) -> Array:
    """Join the parts of all ranks along an axis."""
    if comm.world_size == 1:
        return x
    axis %= len(x.shape)
    xp = namespace(x)
    parts = xp.reshape(comm.all_gather(x), (comm.world_size, *x.shape))
    shape = list(x.shape)
    shape[axis] *= comm.world_size
    return xp.reshape(xp.moveaxis(parts, 0, axis), tuple(shape))


def blocks(x: Array, comm: LayerComm, axis: int) -> Array:
    """Return a view ``[world_size, ...]`` of the equal parts into which an axis is split."""
    axis %= len(x.shape)
    size, n = x.shape[axis], comm.world_size
    if size % n:
        what = {SEQUENCE: "sequence"}.get(axis, "axis")
        raise ArgumentError(
            f"rank {comm.rank} of {n} tensor-parallel ranks: the {what} of an activation of shape "
            f"{tuple(x.shape)} has length {size}, which is not divisible by {n}"
        )
    shape = (*x.shape[:axis], n, size // n, *x.shape[axis + 1 :])
    xp = namespace(x)
    return xp.moveaxis(xp.reshape(x, shape), axis, 0)


def reduce_scatter(x: Array, comm: LayerComm, axis: int) -> Array:
    """Return this rank's part of the sum over ranks, split along an axis."""
    return x if comm.world_size == 1 else comm.reduce_scatter(blocks(x, comm, axis))[0, ...]


def split(x: Array, comm: LayerComm, axis: int) -> Array:
    """Return this rank's part of an array that all ranks have."""
    return x if comm.world_size == 1 else blocks(x, comm, axis)[comm.rank, ...]


class Region(NamedTuple):
    """A boundary: ``forward(x, comm)``, and ``backward(dy, comm)`` for its gradient."""

    forward: Callable[[Array, LayerComm], Array]
    backward: Callable[[Array, LayerComm], Array]


def _along(function: Callable, axis: int) -> Callable[[Array, LayerComm], Array]:
    return lambda x, comm: function(x, comm, axis)


COPY = Region(keep, all_reduce)
"""Every rank uses the same activation; each has a term of its gradient."""
REDUCE = Region(all_reduce, keep)
"""Each rank has a term of the activation."""
GATHER_FEATURES = Region(_along(all_gather, FEATURES), _along(split, FEATURES))
SPLIT_FEATURES = Region(_along(split, FEATURES), _along(all_gather, FEATURES))
GATHER_SEQUENCE = Region(_along(all_gather, SEQUENCE), _along(reduce_scatter, SEQUENCE))
"""Like COPY, where each rank has part of the sequence."""
REDUCE_SCATTER_SEQUENCE = Region(_along(reduce_scatter, SEQUENCE), _along(all_gather, SEQUENCE))
"""Like REDUCE, where each rank gets part of the sequence."""
SPLIT_SEQUENCE = Region(_along(split, SEQUENCE), _along(all_gather, SEQUENCE))

"""Tensor parallelism: what happens where an activation enters or leaves the split layers.

Each boundary is a pair of a forward and a backward function, the adjoint of one another. ``f`` and
``g`` of Megatron-LM are COPY and REDUCE (Shoeybi et al., arXiv 1909.08053, section 3); the pairs of
sequence parallelism put a reduce-scatter and an all-gather in the place of each all-reduce
(Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.arrays import Array, namespace

if TYPE_CHECKING:
    from pycoll.comm import Communicator

SEQUENCE, FEATURES = 1, -1  # axes of an activation [b, s, h]


def keep(x: Array, comm: Communicator) -> Array:
    """Return the array itself."""
    return x


def all_reduce(x: Array, comm: Communicator) -> Array:
    """Return the sum over ranks."""
    return x if comm.world_size == 1 else comm.all_reduce(x)


def all_gather(x: Array, comm: Communicator, axis: int) -> Array:
    """Join the parts of all ranks along an axis."""
    if comm.world_size == 1:
        return x
    axis %= len(x.shape)
    xp = namespace(x)
    parts = xp.reshape(comm.all_gather(x), (comm.world_size, *x.shape))
    shape = list(x.shape)
    shape[axis] *= comm.world_size
    return xp.reshape(xp.moveaxis(parts, 0, axis), tuple(shape))


def blocks(x: Array, comm: Communicator, axis: int) -> Array:
    """Return a view ``[world_size, ...]`` of the parts into which an axis is split.

    Raises:
        ArgumentError: If the axis cannot be split evenly.
    """
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


def reduce_scatter(x: Array, comm: Communicator, axis: int) -> Array:
    """Return this rank's part of the sum over ranks, split along an axis."""
    return x if comm.world_size == 1 else comm.reduce_scatter(blocks(x, comm, axis))[0, ...]


def split(x: Array, comm: Communicator, axis: int) -> Array:
    """Return this rank's part of an array that all ranks have."""
    return x if comm.world_size == 1 else blocks(x, comm, axis)[comm.rank, ...]


class Region(NamedTuple):
    """A boundary: ``forward(x, comm)``, and ``backward(dy, comm)`` for its gradient."""

    forward: Callable[[Array, Communicator], Array]
    backward: Callable[[Array, Communicator], Array]


def _along(function: Callable, axis: int) -> Callable[[Array, Communicator], Array]:
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
"""Like REDUCE, where each rank shall have part of the sequence."""
SPLIT_SEQUENCE = Region(_along(split, SEQUENCE), _along(all_gather, SEQUENCE))


def share(size: int, comm: Communicator, what: str) -> int:
    """Return one rank's share of an axis of a parameter.

    Args:
        size: Length of the axis over all ranks.
        comm: The tensor-parallel ranks.
        what: Name of the parameter and the axis, for the message.

    Raises:
        ArgumentError: If ranks cannot share it evenly, or `comm` is not a communicator.
    """
    if not hasattr(comm, "world_size"):
        raise ArgumentError(
            f"{what}: comm is {kind_of(comm)}; expected the communicator of the "
            "tensor-parallel ranks, such as mesh.tp"
        )
    if size % comm.world_size:
        raise ArgumentError(
            f"{what} has length {size}, which cannot be split over tensor-parallel ranks 0 to "
            f"{comm.world_size - 1}: {size} is not divisible by {comm.world_size}"
        )
    return size // comm.world_size


def own_part(axis: int, comm: Communicator) -> dict[str, Any]:
    """Return what a `ParameterSpec` says of an axis split over ranks; nothing for one rank."""
    if comm.world_size == 1:
        return {}
    part = (comm.rank, comm.world_size)
    return {"tensor_axis": axis, "tensor_part": part, "tensor_comm": comm}


def check_part(array: Array, shape: tuple[int, ...], comm: Communicator, what: str) -> None:
    """Refuse a parameter that is not this rank's part.

    Raises:
        ArgumentError: With the name of the parameter and the rank.
    """
    if tuple(array.shape) != shape:
        raise ArgumentError(
            f"{what} on rank {comm.rank} of {comm.world_size} tensor-parallel ranks has shape "
            f"{tuple(array.shape)}, expected {shape}; parameters and layer must be made for the "
            "same communicator"
        )

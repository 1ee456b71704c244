"""Layers that depend on the position of their input: in the sequence, or in the whole run.

If the sequence is split over ranks, they have the communicator of these ranks, and their input
``[b, s, h]`` is this rank's part of ``s`` consecutive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, Out, cast, move_to, namespace, put, widen
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.context.split import Context, positions
from pycoll.parallel.nn.layer import Grads, NoParameters, ParameterSpec, Params, normal_weight
from pycoll.parallel.random import Cursor, Key, keep_mask


def span(length: int, comm: LayerComm | None) -> slice:
    """Return the positions of this rank, each rank having ``length`` of them."""
    first = 0 if comm is None else comm.rank * length
    return slice(first, first + length)


def place(length: int, sequence: LayerComm | None, context: Context | None) -> list[slice]:
    """Return the positions of this rank's `length` ones, in runs.

    `sequence` and `context` are how the sequence is split, the former within the latter.
    """
    own = span(length, sequence)
    if context is None:
        return [own]
    return context.runs(own.start, own.stop, length * _size(sequence))


def _size(comm: LayerComm | None) -> int:
    return 1 if comm is None else comm.world_size


def draw_mask(
    x: Array,
    key: Key,
    drop: float,
    cursor: Cursor | None,
    size: int,
    part: slice,
    more: Sequence[slice] = (),
) -> Array | None:
    """Return which elements of `x` are kept, one byte each; None: all.

    `x` is a part of an array with all samples of the step along axis 0, and along axis 1 with
    `size` elements, of which `x` has `part`. `more` are parts of the axes of `x` that follow.
    """
    if not drop or cursor is None or not cursor.training:
        return None
    samples = slice(cursor.sample, cursor.sample + x.shape[0])
    shape = (samples.stop, size, *x.shape[2:])
    return move_to(keep_mask(key.fold(cursor.step), drop, shape, [samples, part, *more]), x)


def masked(x: Array, keep: Array | None, drop: float) -> Array:
    """Return ``x`` where it is kept, scaled such that its expectation stays the same."""
    if keep is None:
        return x
    y = namespace(x).where(keep, x, 0)
    y *= 1 / (1 - drop)
    return y


@dataclass(frozen=True)
class Position:
    """Add a learned row for each position: ``[b, s, features]`` -> the same.

    Attributes:
        length: Largest number of positions, of the whole sequence.
        features: Length of a row.
        key: Names the layer, as in `Linear`.
        sequence: Ranks over which the sequence is split.
        context: How it is divided over context-parallel ranks.
        std: Standard deviation of the initial table.
        dtype: Type of the table.
    """

    length: int
    features: int
    key: Key
    sequence: LayerComm | None = None
    std: float = 0.02
    dtype: str = "float32"
    context: Context | None = None

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[length, features]``."""
        shape = (self.length, self.features)
        return {"weight": normal_weight(self, shape, sequence=self.sequence is not None)}

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the sum."""
        runs = place(x.shape[1], self.sequence, self.context)
        if (stop := max(run.stop for run in runs)) > self.length:
            raise ArgumentError(
                f"the input of {self.key.name} has positions up to {stop - 1}, "
                f"but {self.key.name}.weight has {self.length} rows"
            )
        rows = positions(runs)
        return x + params["weight"][rows, :], rows

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``dy``."""
        return dy

    def backward_weight(self, params: Params, saved: Any, dy: Array, out: Out = None) -> Grads:
        """Return the sum over samples, zero in rows that were not used."""
        own = (out or {}).get("weight")
        gradient = namespace(dy).zeros_like(params["weight"]) if own is None else put(0, own)
        gradient[saved, :] = cast(namespace(dy).sum(widen(dy), axis=0), dy.dtype)
        return {"weight": gradient}


@dataclass(frozen=True)
class Dropout(NoParameters):
    """Set numbers of ``[b, s, h]`` to zero at random, and scale the others by ``1 / (1 - drop)``.

    Which ones depends on key, step, and global sample, position and feature, not on the mesh.
    Source: Srivastava et al., JMLR 15 (2014), section 4, with the scaling in training.

    Attributes:
        drop: Probability of a zero.
        key: Names the layer, as in `Linear`.
        cursor: Position of training.
        sequence: Ranks over which the sequence is split.
        context: How it is divided over context-parallel ranks.
    """

    drop: float
    key: Key
    cursor: Cursor
    sequence: LayerComm | None = None
    context: Context | None = None

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves which numbers are kept."""
        length, first, masks = x.shape[1], 0, []
        size = length * _size(self.sequence) * _size(self.context and self.context.comm)
        for run in place(length, self.sequence, self.context):
            stop = first + run.stop - run.start
            part = x[:, first:stop, ...]
            masks.append(draw_mask(part, self.key, self.drop, self.cursor, size, run))
            first = stop
        whole = len(masks) == 1 or masks[0] is None
        keep = masks[0] if whole else namespace(x).concatenate(masks, axis=1)
        return masked(x, keep, self.drop), keep

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return the gradient of what was kept."""
        return masked(dy, saved, self.drop)

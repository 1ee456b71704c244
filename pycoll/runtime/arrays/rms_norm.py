"""Residual add and RMSNorm of rows: the formula with the order of every sum, and its arguments.

`reference` is what the kernel of ``csrc/cuda/kernels/rms_norm.h`` does, in NumPy, with the same
bits. Arrays of the CPU are normalised by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, check_output, overlap
from pycoll.types import DType

UNIT = 8  # neighbouring elements that are added first
LANES = 512
NORM_TYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_ROWS = 64  # that are normalised at once


class NormArrays(NamedTuple):
    """The arrays of a rank, checked."""

    x: ArrayView  # [..., hidden]
    weight: ArrayView  # [hidden]
    residual: ArrayView | None
    out: ArrayView | None  # None: is to be made
    residual_out: ArrayView | None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.x.array.size // self.hidden

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self.x.array.shape[-1]


def check_norm(
    look: Callable[[Any, str], ArrayView],
    x: Any,
    weight: Any,
    residual: Any,
    out: Any,
    residual_out: Any,
) -> NormArrays:
    """Look at the arrays of a rank.

    Raises:
        ArgumentError: If they cannot be used; the text says which, and what is accepted.
    """
    v = look(x, "x")
    shape = tuple(v.array.shape)
    if v.dtype not in NORM_TYPES or not shape or shape[-1] == 0:
        raise ArgumentError(
            f"x is {v.name}{list(shape)}; accepted are rows [..., hidden] of float32, float16 or "
            "bfloat16, with at least one element"
        )
    given = {"weight": (weight, shape[-1:]), "residual": (residual, shape)}
    found: dict[str, ArrayView | None] = {}
    for what, (array, wanted) in given.items():
        found[what] = None if array is None and what == "residual" else look(array, what)
        one = found[what]
        if one is not None and (one.dtype != v.dtype or tuple(one.array.shape) != wanted):
            raise ArgumentError(
                f"{what} is {one.name}{list(one.array.shape)}; with this x it has to be "
                f"{v.name}{list(wanted)}"
            )
        if one is not None and not one.array.flags.c_contiguous:
            raise ArgumentError(f"{what} is not C-contiguous; pass a contiguous copy")
    if residual is None and residual_out is not None:
        raise ArgumentError("residual_out is given, but no residual")
    for what, array in (("out", out), ("residual_out", residual_out)):
        found[what] = None if array is None else look(array, what)
        if array is not None:
            check_output(found[what], shape, v, what)
    arrays = NormArrays(v, **found)
    _check_apart(arrays)
    return arrays


def _check_apart(a: NormArrays) -> None:
    """Refuse an output over another array; each may be what it takes the place of."""
    for what, written, own in (("out", a.out, a.x), ("residual_out", a.residual_out, a.residual)):
        for other, v in zip(NormArrays._fields, a, strict=True):
            if written is None or v is None or other == what or not overlap(written, v):
                continue
            if v is own and v.pointer == written.pointer and v.array.flags.c_contiguous:
                continue
            raise ArgumentError(
                f"{what} overlaps {other}; accepted are memory of its own, out=x and "
                "residual_out=residual"
            )


def check_eps(eps: Any) -> float:
    """Return what is added to the mean square.

    Raises:
        ArgumentError: If it is no number from 0 on.
    """
    try:
        value = float(eps)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentError(f"eps={eps!r}; accepted are finite numbers from 0 on")
    return value


def check_order(order: str | None) -> str:
    """Return in which order ranks are added.

    Raises:
        ArgumentError: If results would depend on something else.
    """
    if order not in (None, "tree", "rank"):
        raise ArgumentError(f"order={order!r}; accepted: 'tree', 'rank'")
    return order or "tree"


def reference(
    s: np.ndarray, weight: np.ndarray, residual: np.ndarray | None, eps: float, dtype: DType
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and h of rows: ``h = s + residual; y = h / sqrt(mean(h * h) + eps) * weight``.

    Each operation is one of float32, rounded to nearest; h and y are rounded once more to their
    type, and y is made from the rounded h. The order of the sum in the mean depends on ``hidden``
    alone. Neighbouring elements form units of 8, the last one filled up with zeros. The squares of
    a unit are added along a binary tree: ``((0+1) + (2+3)) + ((4+5) + (6+7))``. Unit u belongs to
    lane ``u % 512``; a lane adds its units one after the other, and the 512 lanes are added along a
    binary tree.

    Args:
        s: Rows, ``[rows, hidden]``; bfloat16 may appear as uint16, here and in what follows.
        weight: ``[hidden]``.
        residual: ``[rows, hidden]``, or None.
        eps: Added to the mean.
        dtype: Element type of them all.
    """
    with np.errstate(all="ignore"):
        h = s
        if residual is not None:
            h = _rounded(_wide(s, dtype) + _wide(residual, dtype), dtype)
        wide = _wide(h, dtype)
        rows, hidden = wide.shape
        rounds = -(-hidden // (LANES * UNIT))
        squares = np.zeros((rows, rounds * LANES * UNIT), np.float32)
        squares[:, :hidden] = wide * wide
        units = _tree_sum(squares.reshape(rows, rounds, LANES, UNIT))
        lanes = units[:, 0]
        for i in range(1, rounds):
            lanes = lanes + units[:, i]
        root = np.sqrt(_tree_sum(lanes) / np.float32(hidden) + np.float32(eps))
        return _rounded(wide / root[:, None] * _wide(weight, dtype), dtype), h


def normalise(a: NormArrays, s: ArrayView, eps: float) -> None:
    """Make ``a.out``, which may be ``s``, and ``a.residual_out`` from sums over ranks."""

    def rows_of(v: ArrayView) -> np.ndarray:
        return v.array.reshape(-1, a.hidden)

    for i in range(0, a.rows, _ROWS):
        some = slice(i, i + _ROWS)
        residual = None if a.residual is None else rows_of(a.residual)[some]
        y, h = reference(rows_of(s)[some], a.weight.array, residual, eps, a.x.dtype)
        if a.residual_out is not None:
            rows_of(a.residual_out)[some] = h.view(a.residual_out.array.dtype)
        rows_of(a.out)[some] = y.view(a.out.array.dtype)


def _tree_sum(x: np.ndarray) -> np.ndarray:
    """Add along the last axis: neighbours, then neighbours of what comes out."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def _wide(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype != DType.BFLOAT16:
        return x.astype(np.float32)
    return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype != DType.BFLOAT16:
        return x.astype(np.float16 if dtype == DType.FLOAT16 else np.float32)
    bits = x.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(x), np.uint32(0x7FC00000), nearest) >> np.uint32(16)).astype(
        np.uint16
    )

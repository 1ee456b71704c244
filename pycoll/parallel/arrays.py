"""The few array operations that NumPy, CuPy and PyTorch spell differently.

Layers are written against the array API standard, and use in-place operators on arrays of their
own. NumPy needs nothing else; other libraries come in through the package array-api-compat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError

Array = Any
Out = Mapping[str, Array] | None
"""Where results go, by name."""
_PIECE = 1 << 14  # elements
_GROUP = 64  # rows


def namespace(x: Array) -> Any:
    """Return the module of array functions that belongs to an array.

    Raises:
        ArgumentError: If array-api-compat is needed and missing.
    """
    if isinstance(x, np.ndarray | np.generic):
        return np
    try:
        from array_api_compat import array_namespace
    except ImportError:
        raise ArgumentError(
            f"{type(x).__name__} arrays need the package array-api-compat: "
            "pip install array-api-compat"
        ) from None
    return array_namespace(x)


def has_extras(x: Array) -> bool:
    """Tell whether a library has more than the standard: ``einsum``, ``out=``, ``x[i, j] -= y``."""
    return isinstance(x, np.ndarray) or hasattr(x, "to") or hasattr(x, "__cuda_array_interface__")


def kind_of_wrapped(wrap: Callable[[Any], Any]) -> type | None:
    """Return the type that a function makes of arrays of NumPy; None: it leaves them alone."""
    found = wrap(probe := np.zeros(1, np.float32))
    return None if found is probe else type(found)


def shared_array(x: Any, kind: type | None) -> np.ndarray | None:
    """Return an array of NumPy in the memory of one of a kind; None: it is none, or cannot be.

    Tensors that belong to a graph of PyTorch cannot.
    """
    if type(x) is not kind:
        return None
    try:
        found = np.asarray(x)
    except (TypeError, ValueError, RuntimeError, BufferError):
        return None
    return None if found.dtype.hasobject else found


def dtype_name(x: Array) -> str:
    """Return the name of an element type without that of its library, such as ``float32``."""
    return str(x.dtype).rpartition(".")[2]


def cast(x: Array, dtype: Any) -> Array:
    """Return an array in another element type, itself if it has it already."""
    if hasattr(x, "to"):
        return x.to(dtype)
    if hasattr(x, "astype"):
        return x.astype(dtype, copy=False)
    return namespace(x).astype(x, dtype, copy=False)


def widen(x: Array) -> Array:
    """Return 16-bit floating-point numbers as float32, others as they are."""
    return cast(x, namespace(x).float32) if dtype_name(x) in ("float16", "bfloat16") else x


def as_indices(x: Any, like: Array) -> Array:
    """Return integers as int64, in the library and on the device of another array.

    Raises:
        ArgumentError: If they are not integers.
    """
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if "int" not in dtype_name(x):
        raise ArgumentError(f"indices have type {dtype_name(x)}, expected integers")
    return move_to(x, like, namespace(like).int64)


def move_to(x: Any, like: Array, dtype: Any = None) -> Array:
    """Return an array in the library and on the device of another one; without a copy if it can."""
    xp = namespace(like)
    return np.asanyarray(x, dtype) if xp is np else xp.asarray(x, dtype=dtype, device=like.device)


def as_numpy(x: Any) -> np.ndarray:
    """Return an array as one of NumPy: itself, or a copy from a device."""
    return x.get() if hasattr(x, "__cuda_array_interface__") else np.asarray(x)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the matrix product, in `out` if given.

    NumPy has no fast one for 16-bit numbers, so they are widened.
    """
    if isinstance(a, np.ndarray):
        if a.dtype.itemsize == 2:
            return put(np.matmul(widen(a), widen(b)).astype(a.dtype), out)
        return np.matmul(a, b, out=out)
    if out is not None and has_extras(a):
        return namespace(a).matmul(a, b, out=out)
    return put(namespace(a).matmul(a, b), out)


def put(value: Array, out: Array | None) -> Array:
    """Return a value, in `out` if given; it may be there already."""
    if out is None or value is out:
        return value
    out[...] = value
    return out


def put_all(values: Mapping[str, Array], out: Out) -> dict[str, Array]:
    """Return values by name, in the arrays of `out` that have these names."""
    return {name: put(value, (out or {}).get(name)) for name, value in values.items()}


def pieces(x: Array) -> list[slice]:
    """Return slices of a vector that fit in the cache of a core, temporaries included.

    Other libraries than NumPy get the whole vector at once: they may run on a device.
    """
    size = _PIECE if isinstance(x, np.ndarray) else max(x.shape[0], 1)
    return [slice(first, first + size) for first in range(0, x.shape[0], size)]


def row_dot(a: Array, b: Array) -> Array:
    """Return the scalar products along the last axis, which stays with length 1."""
    xp = namespace(a)
    if not has_extras(a):
        return xp.vecdot(a, b)[..., None]
    return xp.einsum("...i,...i->...", a, b)[..., None]


def sum_rows(x: Array, factor: Array | None = None) -> Array:
    """Return the sum over the first axis of a matrix, or of its product with another one.

    Rows are added in groups and then the groups, so that the error grows with the root of their
    number only.
    """
    xp, count = namespace(x), x.shape[0] // _GROUP
    whole, shape = count * _GROUP, (count, _GROUP, x.shape[1])
    if factor is not None and not has_extras(x):
        x, factor = x * factor, None
    groups = xp.reshape(x[:whole, :], shape)
    if factor is None:
        return xp.sum(xp.sum(groups, axis=1), axis=0) + xp.sum(x[whole:, :], axis=0)
    others = xp.reshape(factor[:whole], shape)
    rest = xp.einsum("ni,ni->i", x[whole:], factor[whole:])
    return xp.einsum("gni,gni->gi", groups, others).sum(axis=0) + rest


def add_rows(count: int, indices: Array, rows: Array, out: Array | None = None) -> Array:
    """Return ``[count, width]`` with the sum of the rows of each index, the same bits every time.

    `rows` are ``[n, width]``, `indices` ``[n]`` integers of [0, count). `out` takes the result.
    """
    xp, shape = namespace(rows), (count, rows.shape[1])
    if xp is np:
        total = np.zeros(shape, rows.dtype) if out is None else put(0, out)
        if len(indices):
            order = np.argsort(indices, kind="stable")
            ranked = indices[order]
            first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
            total[ranked[first]] = np.add.reduceat(rows[order], first, axis=0)
        return total
    fresh = out is None
    total = xp.zeros(shape, dtype=rows.dtype, device=rows.device) if fresh else put(0, out)
    if hasattr(total, "index_add_"):
        return total.index_add_(0, indices, rows)
    if has_extras(total):
        xp.add.at(total, indices, rows)
        return total
    numbers = xp.arange(count, dtype=indices.dtype, device=rows.device)
    chosen = xp.astype(numbers[:, None] == indices[None, :], rows.dtype)
    return put(xp.matmul(chosen, rows), total)


def take_rows(table: Array, indices: Array) -> Array:
    """Return the rows of a matrix with these numbers: ``[...]`` -> ``[..., width]``."""
    xp = namespace(table)
    rows = xp.take(table, xp.reshape(indices, (-1,)), axis=0)
    return xp.reshape(rows, (*indices.shape, table.shape[1]))

"""The neutral element of an operation: what combining it with a value leaves as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.types import DType

_SAME = {"sum": 0, "prod": 1, "or": 0, "xor": 0}
_BITS = {  # of types that NumPy may not have
    DType.BFLOAT16: {0.0: 0, 1.0: 0x3F80, np.inf: 0x7F80, -np.inf: 0xFF80},
    DType.FLOAT8_E4M3FN: {0.0: 0, 1.0: 0x38, 448.0: 0x7E, -448.0: 0xFE},
    DType.FLOAT8_E5M2: {0.0: 0, 1.0: 0x3C, np.inf: 0x7C, -np.inf: 0xFC},
}


def fill_with_neutral(v: ArrayView, op: str) -> None:
    """Fill an array with the neutral element of an operation, as `Communicator.exscan` does.

    Sum, or, xor: 0; prod: 1; and: all bits; min and max: the largest and the smallest value,
    infinite where there is one.

    Args:
        v: A writable array of a type for which the operation is defined.
        op: Name of the operation, but not ``avg``, which has none.
    """
    array = v.array
    value = _SAME[op] if op in _SAME else _extreme(v, op)
    if v.dtype in _BITS and array.dtype.kind == "u":
        value = _BITS[v.dtype][float(value)]
    array[...] = value


def _extreme(v: ArrayView, op: str) -> Any:
    """Return the neutral element of min, max or and."""
    kind = v.array.dtype
    if kind == np.bool_:
        return op != "max"
    if v.dtype is not None and v.dtype.is_float:
        most = 448.0 if v.dtype == DType.FLOAT8_E4M3FN else np.inf
        return most if op == "min" else -most
    if op == "and":
        return ~kind.type(0)
    return np.iinfo(kind).max if op == "min" else np.iinfo(kind).min

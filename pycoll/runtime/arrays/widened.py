"""Numbers of 8 and 16 bits as float32, for schedules that round at every step, and back."""

from __future__ import annotations

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.types import DType


def widened(v: ArrayView) -> ArrayView:
    """Return the numbers of an array as float32, which has all of them.

    Raises:
        ArgumentError: If NumPy does not know the type.
    """
    return v._replace(array=_known(v).astype(np.float32), dtype=DType.FLOAT32)


def narrow(x: np.ndarray, v: ArrayView) -> None:
    """Put numbers of float32 into an array, rounded to its type."""
    with np.errstate(over="ignore", invalid="ignore"):
        _known(v)[...] = x


def _known(v: ArrayView) -> np.ndarray:
    """Return an array as one of its type, also if it has come as unsigned integers."""
    if v.array.dtype.kind != "u":
        return v.array
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentError(
            f"a prefix reduction of {v.name} over so many ranks needs the package ml_dtypes; or "
            "pass float32"
        ) from None
    return v.array.view(getattr(ml_dtypes, v.name))

"""Elements that ranks change at the same time, each in one step."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError

_KINDS = {"iuf": "integers or floats", "iu": "integers"}
_PLACES = (int, np.integer, slice, type(...))


def fetch_add(whole: np.ndarray, where: Any, value: Any) -> Any:
    """Add to elements, and return what they were; see `pycoll.Window.fetch_add`."""
    target = _elements(whole, where, "iuf", "fetch_add")
    old = np.empty_like(target)
    _C.atomic_add(target, _alike(target, value), old)
    return old if old.ndim else old[()]


def compare_swap(whole: np.ndarray, where: Any, expected: Any, value: Any) -> Any:
    """Replace elements that are as expected; see `pycoll.Window.compare_swap`."""
    target = _elements(whole, where, "iu", "compare_swap")
    old = _alike(target, expected).copy()
    _C.atomic_replace(target, _alike(target, value), old)
    return old if old.ndim else old[()]


def _elements(whole: np.ndarray, where: Any, kinds: str, call: str) -> np.ndarray:
    """Return a view of some elements of an array."""
    dtype = whole.dtype
    if dtype.kind not in kinds or dtype.itemsize not in (4, 8) or not dtype.isnative:
        text = f"{call} is for {_KINDS[kinds]} of 4 or 8 bytes, and this array has {dtype}"
        raise ArgumentError(text)
    if not whole.flags.aligned:
        raise ArgumentError(f"{call} is for elements at addresses that their size divides")
    place = where if isinstance(where, tuple) else (where,)
    if not all(isinstance(part, _PLACES) and not isinstance(part, bool) for part in place):
        raise ArgumentError(f"{call} takes integers and slices for the place, not {where!r}")
    try:
        return whole[place if ... in place else (*place, ...)]
    except IndexError as error:
        raise ArgumentError(f"{call}: {error}") from None


def _alike(target: np.ndarray, value: Any) -> np.ndarray:
    """Return values of the dtype and shape of some elements."""
    try:
        given = np.asarray(value)
        if given.dtype.kind in "iu" and not isinstance(value, (np.ndarray, np.generic)):
            _check_range(given, target.dtype)  # of Python's integers any that fit
            given = given.astype(target.dtype)
        given = given.astype(target.dtype, casting="same_kind", copy=False)
        return np.broadcast_to(given, target.shape)
    except (TypeError, ValueError, OverflowError) as error:
        what = f"an element of {target.dtype}"
        if target.ndim:
            what = f"elements of {target.dtype} and shape {target.shape}"
        raise ArgumentError(f"{value!r} is not for {what}: {error}") from None


def _check_range(given: np.ndarray, dtype: np.dtype) -> None:
    if dtype.kind not in "iu" or not given.size:
        return
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if given.min() < least or given.max() > most:
        raise OverflowError(f"integers of {dtype} are from {least} to {most}")

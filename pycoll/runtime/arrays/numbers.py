"""Python's numbers, and lists of them, where calls take arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, kind_of

NUMBERS = (bool, int, float, complex)
_INTEGERS = (int, np.integer)
_ANY_KIND = (*NUMBERS, np.number, np.bool_)


def as_array(x: Any, what: str = "x", *, filled: bool = False) -> Any:
    """Return numbers as a new array, and anything else as it is.

    A bool becomes bool, an int int64, a float float64, a complex complex128, a scalar of NumPy's
    an array of its type; a list or tuple, which may be nested, what NumPy makes of it, unless it is
    to be filled.

    Raises:
        ArgumentError: For an int that int64 cannot hold, and a list of other things than numbers.
    """
    if isinstance(x, np.generic):
        return np.array(x)
    if type(x) in NUMBERS:
        return _converted(x, what)
    if isinstance(x, (list, tuple)):
        if filled:
            raise ArgumentError(
                f"{what} is {kind_of(x)}, which a broadcast cannot fill; pass an array, or use "
                "broadcast_object"
            )
        if not _are_numbers(x):
            raise ArgumentError(
                f"{what} is {kind_of(x)} of other things than numbers; pass one array, such as "
                f"np.stack({what}), or for any objects all_gather_object and its like"
            )
        return _converted(x, what)
    return x


def _converted(x: Any, what: str) -> np.ndarray:
    try:
        array = np.array(x)
    except ValueError as error:
        raise ArgumentError(f"{what} is {kind_of(x)} that is no array: {error}") from None
    rounded = array.dtype.kind == "f" and array.size > 0 and _are_numbers(x, _INTEGERS)
    if array.dtype.kind not in "bifc" or rounded:
        raise ArgumentError(
            f"{what} has an int that int64 cannot hold; pass a float, or an object to "
            "all_gather_object and its like"
        )
    return array


def _are_numbers(x: Any, kinds: tuple[type, ...] = _ANY_KIND) -> bool:
    if isinstance(x, (list, tuple)):
        return all(_are_numbers(item, kinds) for item in x)
    return isinstance(x, kinds)

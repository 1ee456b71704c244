"""Numbers that a setting may be."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from pycoll.errors import ArgumentError


def check_number(name: str, value: Any, interval: str, whole: bool = False) -> None:
    """Refuse what is no number of an interval; NaN is in none.

    Args:
        name: Name of the setting.
        value: What was given.
        interval: Such as ``"[0, inf)"``, closed on the left and open on the right.
        whole: Whether it has to be an integer.

    Raises:
        ArgumentError: Naming the setting and what is accepted.
    """
    low, high = map(float, interval[1:-1].split(","))
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    fits = fits and (low < value if interval[0] == "(" else low <= value)
    fits = fits and (value < high if interval[-1] == ")" else value <= high)
    if not fits:
        kind = "integers" if whole else "numbers"
        raise ArgumentError(f"{name}={value!r}; accepted are {kind} in {interval}")


def check_numbers(owner: Any, **intervals: str) -> None:
    """Refuse attributes of `owner` that are not in their intervals; see `check_number`."""
    for name, interval in intervals.items():
        check_number(name, getattr(owner, name), interval)

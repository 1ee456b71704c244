"""Numbers that a setting may be."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from pycoll.errors import ArgumentError


def refusal(name: str, value: Any, interval: str, whole: bool = False) -> str:
    """Tell what is wrong with what is no number of an interval; nothing if it is one.

    Args:
        name: Name of the setting.
        value: What was given.
        interval: Such as ``"[0, inf)"``, closed on the left and open on the right.
        whole: Whether it has to be an integer.
    """
    low, high = map(float, interval[1:-1].split(","))
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    fits = fits and (low < value if interval[0] == "(" else low <= value)
    fits = fits and (value < high if interval[-1] == ")" else value <= high)
    kind = "integers" if whole else "numbers"
    return "" if fits else f"{name}={value!r}; accepted are {kind} in {interval}"


def check_number(name: str, value: Any, interval: str, whole: bool = False) -> None:
    """Refuse what is no number of an interval, NaN among it; see `refusal`.

    Raises:
        ArgumentError: Naming the setting and what is accepted.
    """
    if told := refusal(name, value, interval, whole):
        raise ArgumentError(told)


def check_numbers(owner: Any, **intervals: str) -> None:
    """Refuse attributes of `owner` that are not in their intervals; see `check_number`."""
    for name, interval in intervals.items():
        check_number(name, getattr(owner, name), interval)

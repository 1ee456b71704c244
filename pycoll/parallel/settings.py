"""Values of settings: which numbers are accepted, and a text that ranks can compare."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError

Inner = Callable[[Any], str]  # describes a part of a value
_ADDRESS = re.compile(r"\s+at 0x[0-9a-fA-F]+")


def refusal(name: str, value: Any, interval: str, whole: bool = False) -> str:
    """Return why a value is not a number, or an integer if `whole`, of an interval; else ``""``.

    The interval ``"[0, inf)"`` is closed on the left and open on the right.
    """
    low, high = map(float, interval[1:-1].split(","))
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    fits = fits and (low < value if interval[0] == "(" else low <= value)
    fits = fits and (value < high if interval[-1] == ")" else value <= high)
    kind = "integers" if whole else "numbers"
    return "" if fits else f"{name}={value!r}; accepted are {kind} in {interval}"


def check_number(name: str, value: Any, interval: str, whole: bool = False) -> None:
    """Refuse a value, such as NaN, that is not a number of an interval; see `refusal`.

    Raises:
        ArgumentError: Naming the setting and what is accepted.
    """
    if problem := refusal(name, value, interval, whole):
        raise ArgumentError(problem)


def check_numbers(owner: Any, **intervals: str) -> None:
    """Refuse attributes of `owner` that are not in their intervals; see `check_number`."""
    for name, interval in intervals.items():
        check_number(name, getattr(owner, name), interval)


def describe(value: Any, path: tuple[int, ...] = ()) -> str:
    """Return a text that is the same for equal settings, on every rank.

    An object without a ``__repr__`` of its own is described by its class and public attributes, an
    array by a digest. Memory addresses are left out.

    Args:
        value: Any object.
        path: `id` of the objects that contain it: one that contains itself ends there.
    """
    if id(value) in path:
        return "..."
    inner = functools.partial(describe, path=(*path, id(value)))
    form = next((form for kinds, form in _FORMS if isinstance(value, kinds)), _object)
    return form(value, inner)


def _number(value: Any, inner: Inner) -> str:
    """Describe 1, 1.0 and NumPy's 1.0 alike."""
    return str(int(value)) if isinstance(value, Integral) else repr(float(value)).removesuffix(".0")


def _array(value: np.ndarray, inner: Inner) -> str:
    if value.dtype.hasobject:
        return f"array({inner(value.tolist())})"
    digest = hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
    return f"array({value.dtype}, {value.shape}, {digest})"


def _other_array(value: Any, inner: Inner) -> str:
    """Describe an array of another library, whose own text may leave elements out."""
    value = value.detach() if hasattr(value, "detach") else value
    try:
        return _array(np.from_dlpack(value), inner)
    except (TypeError, RuntimeError, BufferError):  # a type that NumPy has not, or a device
        return f"array({value.dtype}, {tuple(value.shape)}, {inner(value.tolist())})"


def _mapping(value: Mapping[Any, Any], inner: Inner) -> str:
    pairs = sorted((inner(key), inner(item)) for key, item in value.items())
    return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"


def _partial(value: Any, inner: Inner) -> str:
    return f"partial({inner(value.func)}, {inner(list(value.args))}, {inner(value.keywords)})"


def _object(value: Any, inner: Inner) -> str:
    kind = type(value)
    if hasattr(value, "__dlpack__"):
        return _other_array(value, inner)
    if kind.__repr__ is not object.__repr__ and not is_dataclass(value):
        return " ".join(_ADDRESS.sub("", repr(value)).split())
    found = sorted(_public(value).items())
    return f"{kind.__qualname__}({', '.join(f'{name}={inner(part)}' for name, part in found)})"


def _public(value: Any) -> dict[str, Any]:
    """Return the public attributes of an object and its classes."""
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__[:-1]):
        for name, part in vars(kind).items():
            if isinstance(part, MemberDescriptorType):  # of __slots__
                found |= {name: getattr(value, name)} if hasattr(value, name) else {}
            elif not callable(part) and not hasattr(part, "__get__"):
                found[name] = part
    found |= getattr(value, "__dict__", {})
    return {name: part for name, part in found.items() if not name.startswith("_")}


_FORMS: tuple[tuple[Any, Callable[[Any, Inner], str]], ...] = (
    ((bool, str, bytes, Enum, type(None)), lambda value, inner: repr(value)),
    (Real, _number),
    (np.dtype, lambda value, inner: str(value)),
    (np.ndarray, _array),
    (Mapping, _mapping),
    ((set, frozenset), lambda value, inner: f"{{{', '.join(sorted(map(inner, value)))}}}"),
    (tuple, lambda value, inner: f"({', '.join(map(inner, value))}{',' * (len(value) == 1)})"),
    (list, lambda value, inner: f"[{', '.join(map(inner, value))}]"),
    (functools.partial, _partial),
    (
        (type, FunctionType, BuiltinFunctionType),
        lambda value, inner: f"{value.__module__}.{value.__qualname__}",
    ),
)
"""Types and how to describe them; the first that fits. Others are objects with attributes."""

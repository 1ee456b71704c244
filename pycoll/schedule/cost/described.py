"""Networks from a line of text, such as ``fat-tree:leaf=32,over=2,bw=25G,latency=2us``."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import MISSING, Field, fields
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.fabric import Dragonfly, Fabric, FatTree, Rails
from pycoll.schedule.cost.torus import Torus

KINDS: tuple[type[Fabric], ...] = (Fabric, FatTree, Dragonfly, Torus, Rails)
_SPEED = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def fabric(text: str, n: int, speeds: tuple[tuple[str, float], ...] = ()) -> Fabric:
    """Make a network of n ranks of its description.

    Args:
        text: ``KIND`` or ``KIND:NAME=VALUE,...``. Speeds are bytes per second (``25G``), or bits
            per second with a b (``200Gb``); times have a unit (``2us``). ``torus:16x16`` needs the
            length of its axes.
        n: Number of ranks.
        speeds: See `Fabric`.

    Raises:
        ArgumentError: For a kind, a name or a value that there is not.
    """
    kind, _, rest = text.partition(":")
    known = {each.kind: each for each in KINDS}
    if kind not in known:
        raise ArgumentError(f"there is no network {kind!r}{_closest(kind, list(known))}")
    made = known[kind]
    own = {f.name: f for f in fields(made) if f.name not in ("n", "speeds")}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals and made is Torus:
            name, value = "dims", part
        if name not in own or name in given:
            twice = " twice" if name in given else ""
            raise ArgumentError(f"{text}: {kind} has no {name!r}{twice}{_closest(name, list(own))}")
        given[name] = _value(own[name], value, text)
    found = made(n, speeds=speeds, **given)
    for name, _ in speeds:
        found.number(name)
    return found


def describe() -> str:
    """Return the kinds of networks with what can be set, a line for each."""
    lines = []
    for kind in KINDS:
        shown = [f"{f.name}={_shown(f)}" for f in fields(kind) if f.name not in ("n", "speeds")]
        lines.append(f"{kind.kind}: {kind.about}; {', '.join(shown)}")
    return "\n".join(lines)


def _shown(field: Field) -> str:
    default = field.default
    if default is MISSING or default == ():
        return "16x16"
    if field.name.endswith(("latency", "hop", "gap")):
        return f"{default * 1e6:g}us"
    if field.name.endswith(("bw", "fold")):
        return f"{default / 1e9:g}G"
    return f"{default:g}"


def seconds(text: str) -> float:
    """Read a time with its unit, such as ``2us``.

    Raises:
        ArgumentError: If it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|ms|s)", text.strip())
    if match is None:
        raise ArgumentError(f"{text!r} is no time, expected for example 2us, 10ms or 1.5s")
    return float(match[1]) * _TIME[match[2]]


def per_second(text: str) -> float:
    """Read a speed: bytes per second such as ``25G``, or bits per second such as ``200Gb``.

    Raises:
        ArgumentError: If it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([KMGT]?)(b?)", text.strip())
    if match is None:
        raise ArgumentError(f"{text!r} is no speed, expected for example 25G bytes/s or 200Gb")
    return float(match[1]) * _SPEED[match[2]] / (8 if match[3] else 1)


def _value(field: Field, text: str, whole: str) -> Any:
    try:
        if field.name == "dims":
            return tuple(int(part) for part in text.split("x"))
        if field.name.endswith(("latency", "hop", "gap")):
            return seconds(text)
        if field.name.endswith(("bw", "fold")):
            return per_second(text)
        number = int(text) if isinstance(field.default, int) else float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (ValueError, ArgumentError) as error:
        why = error if isinstance(error, ArgumentError) else f"{text!r} is no number"
        raise ArgumentError(f"{whole}: {field.name}: {why}") from None


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"

"""Hashes of arrays: BLAKE3 where it is installed, a third of the time of SHA-256, else SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ModuleNotFoundError:
        raise ArgumentError(
            "the hashes of this checkpoint are BLAKE3, which needs a package: pip install blake3"
        ) from None
    return blake3


_KINDS: dict[str, Callable[[], Any]] = {"blake3": _blake3, "sha256": lambda: hashlib.sha256}


def kind_of(text: str) -> str:
    """Return by what a hash was made.

    Raises:
        ValueError: If it is none of this library.
    """
    kind = text.partition(":")[0]
    if kind not in _KINDS:
        raise ValueError(f"a hash begins with {kind!r}; known: {', '.join(_KINDS)}")
    return kind


def fastest() -> str:
    """Return the best kind of hash that can be made here."""
    try:
        _blake3()
    except ArgumentError:
        return "sha256"
    return "blake3"


def hash_of(data: np.ndarray, kind: str) -> str:
    """Return the hash of the bytes of an array: ``kind:digits``.

    Raises:
        ArgumentError: If the package for it is missing.
    """
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return f"{kind}:{_KINDS[kind]()(flat).hexdigest()}"

"""Shapes of results."""

from __future__ import annotations

from collections.abc import Callable

from pycoll.errors import ArgumentError
from pycoll.types import Kind

Shape = tuple[int, ...]


def _same(shape: Shape, n: int) -> Shape:
    return shape


def _join(shape: Shape, n: int) -> Shape:
    return (n * shape[0], *shape[1:]) if shape else (n,)


def _split(shape: Shape, n: int) -> Shape:
    if not shape or shape[0] % n:
        raise ArgumentError(
            f"x has shape {shape}; its first dimension must be a multiple of the world size {n}"
        )
    return (shape[0] // n, *shape[1:])


def _blocks(shape: Shape, n: int) -> Shape:
    _split(shape, n)
    return shape


RESULT_SHAPE: dict[Kind, Callable[[Shape, int], Shape]] = {
    Kind.ALL_REDUCE: _same,
    Kind.REDUCE_SCATTER: _split,
    Kind.ALL_GATHER: _join,
    Kind.BROADCAST: _same,
    Kind.REDUCE: _same,
    Kind.GATHER: _join,
    Kind.SCATTER: _split,
    Kind.ALL_TO_ALL: _blocks,
    Kind.BARRIER: _same,
}

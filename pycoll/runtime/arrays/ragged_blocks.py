"""Sizes of the blocks of v-variants: what is accepted, and where blocks lie then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.types import Kind

_MOST_ROWS = 1 << 48  # as kMostElements of csrc/engine/bind.cpp


def _prefix(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths, axis=-1) - lengths


def _numbers(counts: Any, shape: tuple[int, ...], accepted: str) -> tuple[np.ndarray, int]:
    """Return numbers of rows of that shape, and their sum."""
    try:
        table = np.asarray(counts)
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"counts={counts!r}; {accepted}: {error}") from None
    if table.shape != shape or table.dtype.kind not in "iu" or (table < 0).any():
        raise ArgumentError(f"counts={counts!r}; {accepted}")
    return table, sum(table.ravel().tolist())  # of Python's integers, which do not wrap


def check_counts(counts: Sequence[int], n: int, rows: int | None) -> np.ndarray:
    """Return the rows of each rank, checked; ``rows`` are those of x, if they have to add up."""
    accepted = f"accepted are {n} integers >= 0, one for each rank"
    table, total = _numbers(counts, (n,), accepted)
    if rows is not None and total != rows:
        raise ArgumentError(f"counts add up to {total}, but x has {rows} rows")
    if total > _MOST_ROWS:
        raise ArgumentError(f"counts={counts!r}; {accepted}, and at most {_MOST_ROWS} rows in all")
    return table.astype(np.uint64)


def check_matrix(matrix: Any, n: int, rank: int, rows: int) -> np.ndarray:
    """Return the rows from each rank to each, ``[n, n]``, as integers."""
    accepted = (
        f"accepted are {n} rows of {n} integers >= 0, from each rank to each, and at most "
        f"{_MOST_ROWS} rows in all"
    )
    sent, total = _numbers(matrix, (n, n), accepted)
    if total > _MOST_ROWS:
        raise ArgumentError(f"counts={matrix!r}; {accepted}")
    if sent[rank].sum() != rows:
        raise ArgumentError(f"counts[{rank}] add up to {sent[rank].sum()}, but x has {rows} rows")
    return np.ascontiguousarray(sent, np.uint64)


def gathered(block: np.ndarray) -> ChunkLayout:
    """Return where blocks lie that every rank contributes one of."""
    return ChunkLayout(np.zeros_like(block), block, _prefix(block), block)


def scattered(block: np.ndarray) -> ChunkLayout:
    """Return where blocks lie of which every rank gets one."""
    return ChunkLayout(_prefix(block), block, np.zeros_like(block), block)


def exchanged(sent: np.ndarray) -> ChunkLayout:
    """Return where blocks lie that go from each rank to each, ``sent`` by sender and receiver."""
    received = np.ascontiguousarray(sent.T)
    return ChunkLayout(_prefix(sent), sent, _prefix(received), received)


class Sizes(NamedTuple):
    """The blocks of a v-variant of ranks that know all of them."""

    sent: np.ndarray  # rows: of each rank, or from each to each
    extents: Callable[[np.ndarray], ChunkLayout]
    width: int  # elements of a row
    rows_out: list[int]  # of the result of each rank

    def layout(self, scale: int) -> ChunkLayout:
        """Return where blocks lie; ``scale`` is how many elements stand for one of the caller's."""
        n = len(self.rows_out)
        lengths = self.sent * np.uint64(self.width * max(1, scale))
        return self.extents(np.broadcast_to(lengths, (n, n)))


def sizes_of(kind: Kind, xs: Sequence[ArrayView], counts: Any, n: int) -> Sizes:
    """Check the arrays of all ranks of a v-variant, and return their blocks.

    Args:
        kind: ``ALL_GATHER_V``, ``REDUCE_SCATTER_V`` or ``ALL_TO_ALL_V``.
        xs: The arrays.
        counts: As the collective takes them; of an exchange from each rank to each.
        n: World size.

    Raises:
        ArgumentError: If they do not fit.
    """
    if any(v.array.ndim == 0 for v in xs):
        raise ArgumentError("xs has a 0-dimensional array; a v-variant divides the first dimension")
    if len({(v.name, v.array.shape[1:]) for v in xs}) > 1:
        raise ArgumentError("the arrays of all ranks must have rows of one shape, and one dtype")
    rows, width = [v.array.shape[0] for v in xs], math.prod(xs[0].array.shape[1:])
    if kind == Kind.ALL_GATHER_V:
        sent = np.array(rows, np.uint64)
        return Sizes(sent, gathered, width, [sum(rows)] * n)
    if kind == Kind.ALL_TO_ALL_V:
        sent = [check_matrix(counts, n, rank, rows[rank]) for rank in range(n)][-1]
        return Sizes(sent, exchanged, width, [int(k) for k in sent.sum(axis=0)])
    for each in rows:
        sent = check_counts(counts, n, each)
    return Sizes(sent, scattered, width, [int(k) for k in sent])

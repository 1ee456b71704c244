"""Stretches: parts of folds over many chunks such that no two accesses overlap in part.

Where one fold's piece begins or ends inside another's, the other one is cut, at all of its pieces;
that may cut further folds. What is left is as few parts as can be told apart, and a dependence
between two chunks is one between the stretches that they lie in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer
from pycoll.schedule.lowering.places import Found
from pycoll.schedule.lowering.table import distinct, spans


class Stretches(NamedTuple):
    """The stretches of some folds, those of a fold together and in order."""

    # fold, offset, width: ``[stretches]``
    fold: np.ndarray
    offset: np.ndarray
    width: np.ndarray

    def of(self, folds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return fold (as an index of these), offset and width of the stretches of some folds."""
        low = np.searchsorted(self.fold, folds, "left")
        index, place = spans(np.searchsorted(self.fold, folds, "right") - low)
        at = low[index] + place
        return index, self.offset[at], self.width[at]


class _Pieces(NamedTuple):
    """Pieces that do not wrap around the end of their buffer."""

    # fold, offset, start, count: ``[pieces]`` start: of the piece in the memory of all ranks
    fold: np.ndarray
    offset: np.ndarray
    start: np.ndarray
    count: np.ndarray


def stretches(found: Found, n: int, chunks: int, span: int) -> Stretches:
    """Cut folds.

    Args:
        found: Their pieces, each over all chunks of its fold.
        n: World size.
        chunks: Number of chunks of the user buffers.
        span: What to multiply a place with, so that all of its chunks and slots fit.
    """
    fold = found.line * n + found.owner
    height = int(found.width.max(initial=0)) + 1
    pieces = _unwrapped(found, fold, chunks, span)
    known = distinct(pieces.fold * height + pieces.offset)
    while True:
        more = distinct(np.concatenate([known, _cut(pieces, known, height)]))
        if len(more) == len(known):
            break
        known = more
    fold_of, offset = np.divmod(known, height)
    order = np.argsort(fold, kind="stable")
    total = found.width[order][np.searchsorted(fold[order], fold_of)]
    last = np.append(fold_of[1:] != fold_of[:-1], True)[: len(fold_of)]
    return Stretches(fold_of, offset, np.where(last, total, np.roll(offset, -1)) - offset)


def _unwrapped(found: Found, fold: np.ndarray, chunks: int, span: int) -> _Pieces:
    """Make two pieces of each that goes on at the first chunk of its buffer."""
    scratch = found.buffer == Buffer.TMP.value
    base = (found.rank * 2 + scratch) * span
    until = np.where(scratch, found.width, np.minimum(found.width, chunks - found.chunk))
    rest = np.flatnonzero(until < found.width)
    none = np.zeros_like(fold)
    return _Pieces(
        np.concatenate([fold, fold[rest]]),
        np.concatenate([none, until[rest]]),
        np.concatenate([base + found.chunk, base[rest]]),
        np.concatenate([until, (found.width - until)[rest]]),
    )


def _cut(pieces: _Pieces, known: np.ndarray, height: int) -> np.ndarray:
    """Return where folds are cut because others begin, end or are cut there: fold and offset."""
    key = pieces.fold * height + pieces.offset
    low = np.searchsorted(known, key)
    piece, place = spans(np.searchsorted(known, key + pieces.count) - low)
    inner = pieces.start[piece] + known[low[piece] + place] - key[piece]
    cuts = distinct(np.concatenate([inner, pieces.start, pieces.start + pieces.count]))
    low = np.searchsorted(cuts, pieces.start, "right")
    piece, place = spans(np.searchsorted(cuts, pieces.start + pieces.count) - low)
    return key[piece] + cuts[low[piece] + place] - pieces.start[piece]

"""What others do to the places that a rank touches, looked up in a relative schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.places import RESULTS, Found, Places, one_of
from pycoll.schedule.lowering.table import distinct, spans

_TMP = Buffer.TMP.value


def looked_up(lines: RelativeLines, places: Places, whole: bool) -> Found:
    """Find others' accesses by what rank 0 does."""
    n, focus = places.n, places.focus
    arity = lines.nsrc + lines.ndst
    first = np.cumsum(arity) - arity
    # Each chunk of each piece of rank 0 is an entry.
    line_of = np.repeat(np.arange(len(arity)), arity)
    piece, offset = spans(lines.count[line_of])
    line = line_of[piece]
    write = piece - first[line] >= lines.nsrc[line]
    rank, moves = lines.rank[piece] % n, lines.moves[piece]
    chunk, moves_chunk = lines.chunk[piece] + offset, lines.moves_chunk[piece]
    scratch = lines.buffer[piece] == _TMP
    result = one_of(lines.buffer[piece], RESULTS)
    chunk = np.where(scratch, chunk, chunk % places.chunks)
    entries = _Entries(rank, chunk, moves, moves_chunk, scratch, write, result)
    e, q = _touching(entries, places)
    e, q = e[q != focus], q[q != focus]
    if whole:
        home = (rank[e] + moves[e] * q) % n == focus
        e, q = _with_all(e, q, home & (lines.count > 1)[line[e]], line, n)
    e, q = _with_sources(e, q, line, piece, offset, lines.nsrc == 1)
    at = (rank[e] + moves[e] * q) % n
    there = chunk[e] + moves_chunk[e] * q
    there = np.where(scratch[e], there, there % places.chunks)
    one = np.ones(len(e), np.int64)
    return Found(line[e], piece[e], q, offset[e], one, at, lines.buffer[piece[e]], there)


class _Entries(NamedTuple):
    """The chunks of all pieces of rank 0, each as an entry."""

    # ``[entries]``: place, whether it moves with the owner, and kind of access
    rank: np.ndarray
    chunk: np.ndarray
    moves: np.ndarray
    moves_chunk: np.ndarray
    scratch: np.ndarray
    write: np.ndarray
    result: np.ndarray


def _touching(entries_of: _Entries, places: Places) -> tuple[np.ndarray, np.ndarray]:
    """Return entries and owners who touch, there, what the one rank touches."""
    rank, chunk, moves, moves_chunk, scratch, write, result = entries_of
    n, focus = places.n, places.focus
    # Its own memory: a piece that moves is there for one owner, one that does not for all or none.
    here, fixed = np.flatnonzero(moves), np.flatnonzero(~moves & (rank == focus))
    entry = [here, np.repeat(fixed, n)]
    owner = [(focus - rank[here]) % n, np.arange(len(fixed) * n) % n]
    x, cell_scratch, y = places.split()
    for keys, cell_keys, entries, owners in (
        (  # the distance from rank to chunk is the same for every owner
            (chunk - rank) % n,
            np.where(cell_scratch, -1, (y - x) % n),
            moves & moves_chunk,
            lambda e, c: (x[c] - rank[e]) % n,
        ),
        (
            2 * chunk + scratch,
            2 * y + cell_scratch,
            moves & ~moves_chunk,
            lambda e, c: (x[c] - rank[e]) % n,
        ),
        (
            rank,
            np.where(cell_scratch, -1, x),
            ~moves & moves_chunk,
            lambda e, c: (y[c] - chunk[e]) % n,
        ),
        (places.number(rank, scratch, chunk), places.cell, ~moves & ~moves_chunk, None),
    ):
        for cells, which in (
            (places.written, entries),
            (~places.written, entries & write),
            (~places.written & places.asked, entries & ~write & result),
        ):
            e, c = _same(keys, np.flatnonzero(which), cell_keys, np.flatnonzero(cells))
            if owners is None:
                entry.append(np.repeat(e, n))
                owner.append(np.arange(len(e) * n) % n)
            else:
                entry.append(e)
                owner.append(owners(e, c))
    return np.concatenate(entry), np.concatenate(owner)


def _same(
    keys: np.ndarray, entries: np.ndarray, cell_keys: np.ndarray, cells: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pair the entries and the cells that have the same key."""
    if not len(entries) or not len(cells):
        return entries[:0], cells[:0]
    cells = cells[np.argsort(cell_keys[cells], kind="stable")]
    known = cell_keys[cells]
    low = np.searchsorted(known, keys[entries], "left")
    high = np.searchsorted(known, keys[entries], "right")
    pair, place = spans(high - low)
    return entries[pair], cells[low[pair] + place]


def _with_all(
    e: np.ndarray, q: np.ndarray, chosen: np.ndarray, line: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Add all entries of the folds of which an entry is chosen."""
    folds = distinct(line[e[chosen]] * n + q[chosen])
    low = np.searchsorted(line, folds // n, "left")
    high = np.searchsorted(line, folds // n, "right")
    fold, place = spans(high - low)
    return np.concatenate([e, low[fold] + place]), np.concatenate([q, (folds % n)[fold]])


def _with_sources(
    e: np.ndarray,
    q: np.ndarray,
    line: np.ndarray,
    piece: np.ndarray,
    offset: np.ndarray,
    copies: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Add the source of each copy of which a destination was found."""
    copied = np.flatnonzero(copies[line[e]])
    if not len(copied):
        return e, q
    # Entries are sorted by piece, then by offset: the source's come first in their line.
    start = np.searchsorted(line, line[e[copied]], "left")
    return (
        np.concatenate([e, start + offset[e[copied]]]),
        np.concatenate([q, q[copied]]),
    )

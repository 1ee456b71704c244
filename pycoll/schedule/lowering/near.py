"""The folds that one rank's plan is made of: its own, and what others do to the same memory.

A rank has to know of an access of another rank's fold

* if the memory is its own,
* if it writes that memory, or
* if it reads that memory and the access is a write,
* if it reads an input and the access reads the result in its place: staged, both share a slot.

So that costs what the rank does, not what the world does, others' folds are listed with these
accesses only. They are found in one of two ways. A relative schedule is the same for every rank, so
one sorts all its pieces by the places that they can reach, and looks each place up. Any other one
is gone through round by round, for the vector of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer, Fold, Schedule, Vector
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.table import (
    FoldTable,
    Lines,
    Marks,
    check_slots,
    distinct,
    expand,
    lines_of,
    resolve_acc,
    spans,
)

_TMP = Buffer.TMP.value
_INPUTS = Buffer.IN.value, Buffer.ACC.value
_RESULTS = Buffer.OUT.value, Buffer.ACC.value


def _one_of(buffer: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
    return (buffer == pair[0]) | (buffer == pair[1])


def near_table(schedule: Schedule, rank: int, *, whole: bool = False) -> FoldTable:
    """List a rank's folds, and others' folds as far as they touch what it touches.

    Args:
        schedule: What to list.
        rank: The one rank.
        whole: List all pieces of others' folds over several chunks, if these touch its memory.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    relative = schedule.relative
    lines = lines_of(schedule, np.array([rank])) if relative is None else _lines_at(relative, rank)
    own = expand(schedule, lines, np.array([rank]))
    places = _Places(schedule, own, rank)
    if relative is None:
        other = _gone_through(schedule, lines, places, whole)
    else:
        other = _looked_up(relative, places, whole)
    table = _joined(own, lines, other)
    check_slots(schedule, table)
    return resolve_acc(table, schedule)


def _lines_at(lines: RelativeLines, rank: int) -> Lines:
    """Return the folds of one rank."""
    arity = lines.nsrc + lines.ndst
    return Lines(
        lines.round,
        lines.tree,
        lines.nsrc,
        lines.ndst,
        np.cumsum(arity) - arity,
        lines.count[:, None],
        np.repeat(np.arange(len(arity)), arity),
        lines.buffer,
        (lines.rank + lines.moves * rank)[:, None],
        (lines.chunk + lines.moves_chunk * rank)[:, None],
    )


class _Found(NamedTuple):
    """Operands of others' folds, in any order and perhaps more than once."""

    # line, piece, owner, offset: ``[operands]``, the piece counted over all lines
    line: np.ndarray
    piece: np.ndarray
    owner: np.ndarray
    offset: np.ndarray
    # rank, buffer, chunk: ``[operands]``
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray


class _Places:
    """The places that a rank touches elsewhere, IN and OUT being one, and whether it writes."""

    def __init__(self, schedule: Schedule, own: FoldTable, rank: int) -> None:
        self.n, self.chunks, self.focus = schedule.n, max(1, schedule.chunks), rank
        self.span = max(self.chunks, schedule.slots) + 1
        away = own.rank != rank
        number = self.number(own.rank[away], own.buffer[away] == _TMP, own.chunk[away])
        self.cell = distinct(number)
        self.written = np.zeros(len(self.cell), bool)
        self.written[np.searchsorted(self.cell, number[own.is_write[away]])] = True
        # Places whose inputs it reads: others may read the results there.
        self.asked = np.zeros(len(self.cell), bool)
        inputs = _one_of(own.buffer[away], _INPUTS)
        self.asked[np.searchsorted(self.cell, number[inputs & ~own.is_write[away]])] = True

    def number(self, rank: np.ndarray, scratch: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Number places."""
        return (rank * 2 + scratch) * self.span + chunk

    def split(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rank, whether it is scratch memory, and chunk of the cells."""
        piece, chunk = np.divmod(self.cell, self.span)
        return piece // 2, piece % 2 == 1, chunk

    def near(self, found: _Found, write: np.ndarray) -> np.ndarray:
        """Tell which of others' accesses the rank has to know of."""
        number = self.number(found.rank, found.buffer == _TMP, found.chunk)
        at = np.minimum(np.searchsorted(self.cell, number), max(0, len(self.cell) - 1))
        if not len(self.cell):
            return found.rank == self.focus
        result = _one_of(found.buffer, _RESULTS)
        known = (self.cell[at] == number) & (write | self.written[at] | (self.asked[at] & result))
        return known | (found.rank == self.focus)


# --- Relative schedules ---------------------------------------------------------------------------


def _looked_up(lines: RelativeLines, places: _Places, whole: bool) -> _Found:
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
    result = _one_of(lines.buffer[piece], _RESULTS)
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
    return _Found(line[e], piece[e], q, offset[e], at, lines.buffer[piece[e]], there)


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


def _touching(entries_of: _Entries, places: _Places) -> tuple[np.ndarray, np.ndarray]:
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


# --- Other schedules ------------------------------------------------------------------------------


def _gone_through(schedule: Schedule, lines: Lines, places: _Places, whole: bool) -> _Found:
    """Find others' accesses round by round."""
    n, focus = places.n, places.focus
    hulls = _hulls(places)
    everyone = schedule.all_ranks()
    found: list[_Found] = []
    number = 0
    for folds in schedule.rounds(everyone):
        for f in folds:
            count = np.broadcast_to(np.where(f.where, f.count, 0), (n,))
            busy = np.flatnonzero(count)
            busy = busy[busy != focus]
            if len(busy):
                first = int(lines.first[number])
                found.append(_of_fold(f, number, first, busy, count[busy], places, hulls, whole))
            number += 1
    none = np.zeros(0, np.int64)
    columns = map(np.concatenate, zip(*found, strict=True)) if found else [none] * 7
    result = _Found(*columns)
    if not len(result.line):
        return result
    source = result.piece < (lines.first + lines.nsrc)[result.line]
    kept = places.near(result, ~source) | (source & (lines.nsrc[result.line] == 1))
    if whole:
        fold = result.line * n + result.owner
        kept |= Marks(fold[result.rank == focus]).has(fold)
    return _Found(*(column[kept] for column in result))


def _hulls(places: _Places) -> tuple[np.ndarray, np.ndarray]:
    """For each rank and kind of memory, and for reads and writes, what is touched in between.

    The result is ``[2, 2 n]``: row 1 for accesses that write.
    """
    rank, scratch, chunk = places.split()
    low = np.full((2, 2 * places.n), np.iinfo(np.int64).max)
    high = np.full((2, 2 * places.n), -1)
    at = 2 * rank + scratch
    for row, cells in ((0, places.written | places.asked), (1, slice(None))):
        np.minimum.at(low[row], at[cells], chunk[cells])
        np.maximum.at(high[row], at[cells], chunk[cells] + 1)
    low[:, 2 * places.focus : 2 * places.focus + 2] = 0
    high[:, 2 * places.focus : 2 * places.focus + 2] = np.iinfo(np.int64).max
    return low, high


def _of_fold(
    f: Fold,
    line: int,
    first: int,
    owners: np.ndarray,
    count: np.ndarray,
    places: _Places,
    hulls: tuple[np.ndarray, np.ndarray],
    whole: bool,
) -> _Found:
    """List what some owners access in one fold, if it may be near; ``count`` is of each of them."""
    scratch = np.array([p.buffer is Buffer.TMP for p in f.pieces])[:, None]
    rank = _matrix([p.rank for p in f.pieces], owners) % places.n
    chunk = _matrix([p.chunk for p in f.pieces], owners)
    chunk = np.where(scratch, chunk, chunk % places.chunks)
    write = (np.arange(len(scratch)) >= len(f.srcs)).astype(int)[:, None]
    at = 2 * rank + scratch
    low, high = (hull[write, at] for hull in hulls)
    inside = (chunk < high) & (chunk + count > low)
    inside |= ~scratch & (chunk + count - places.chunks > low) & (high > 0)
    if whole:
        inside[:] = inside.any(axis=0)
    elif len(f.srcs) == 1:
        inside[0] = inside.any(axis=0)
    piece, column = np.nonzero(inside)
    of, offset = spans(count[column])
    piece, column = piece[of], column[of]
    there = chunk[piece, column] + offset
    buffer = np.array([p.buffer.value for p in f.pieces])[piece]
    there = np.where(buffer == _TMP, there, there % places.chunks)
    lines = np.full(len(piece), line)
    return _Found(lines, first + piece, owners[column], offset, rank[piece, column], buffer, there)


def _matrix(numbers: list[Vector], owners: np.ndarray) -> np.ndarray:
    """Return ``[pieces, owners]`` the entries of the owners."""
    if all(isinstance(number, (int, np.integer)) for number in numbers):
        return np.broadcast_to(np.array(numbers, np.int64)[:, None], (len(numbers), len(owners)))
    whole = np.empty((len(numbers), len(owners)), np.int64)
    for row, number in zip(whole, numbers, strict=True):
        row[:] = number if np.size(number) == 1 else number[owners]
    return whole


# --- The table ------------------------------------------------------------------------------------


def _joined(own: FoldTable, lines: Lines, found: _Found) -> FoldTable:
    """Put own folds and those parts of others' together."""
    order = np.lexsort((found.piece, found.offset, found.owner, found.line))
    found = _Found(*(column[order] for column in found))
    fold = found.line * own.n + found.owner
    differs = np.ones(len(fold), bool)
    same = (fold[1:] == fold[:-1]) & (found.offset[1:] == found.offset[:-1])
    differs[1:] = ~same | (found.piece[1:] != found.piece[:-1])
    found = _Found(*(column[differs] for column in found))
    starts = np.ones(len(found.line), bool)
    fold = found.line * own.n + found.owner
    starts[1:] = (fold[1:] != fold[:-1]) | (found.offset[1:] != found.offset[:-1])
    head = np.flatnonzero(starts)
    line = found.line[head]
    source = found.piece < (lines.first + lines.nsrc)[found.line] if len(head) else starts
    unit = np.cumsum(starts) - 1
    nsrc = np.bincount(unit[source], minlength=len(head))
    arity = np.diff(np.append(head, len(unit)))
    return FoldTable(
        n=own.n,
        lines=own.lines,
        line_round=own.line_round,
        owner=np.concatenate([own.owner, found.owner[head]]),
        line=np.concatenate([own.line, line]),
        tree=np.concatenate([own.tree, lines.tree[line]]),
        nsrc=np.concatenate([own.nsrc, nsrc]),
        ndst=np.concatenate([own.ndst, arity - nsrc]),
        combines=np.concatenate([own.combines, lines.nsrc[line] > 1]),
        rank=np.concatenate([own.rank, found.rank]),
        buffer=np.concatenate([own.buffer, found.buffer]),
        chunk=np.concatenate([own.chunk, found.chunk]),
    )

"""The folds of a schedule as flat arrays, one entry per chunk.

A `FoldTable` lists *unit folds*: folds of a single chunk. Unit fold i is executed by ``owner[i]``
at line ``line[i]`` and uses the operands ``first[i] .. first[i] + nsrc[i] + ndst[i]``, sources
before destinations. Everything the compiler does is then arithmetic on whole columns.

NumPy is given the values of enumerations, never their members, and no rows to make unique: it would
call Python code then, and swallow an exception raised there, which may be that of a signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Schedule, Vector


@dataclass
class FoldTable:
    """Unit folds of some ranks, with their operands."""

    n: int  # world size
    lines: int  # number of lines of the schedule
    line_round: np.ndarray  # ``[lines]`` round of each line
    # owner, line, tree: ``[units]`` executing rank, line, and shape of each unit fold
    owner: np.ndarray
    line: np.ndarray
    tree: np.ndarray
    # nsrc, ndst: ``[units]`` numbers of sources and destinations
    nsrc: np.ndarray
    ndst: np.ndarray
    # rank, buffer, chunk: ``[operands]`` where each operand lives
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """``[units]`` index of the first operand of each unit fold."""
        return np.cumsum(self.nsrc + self.ndst) - (self.nsrc + self.ndst)

    @property
    def unit(self) -> np.ndarray:
        """``[operands]`` unit fold that each operand belongs to."""
        return np.repeat(np.arange(len(self.owner)), self.nsrc + self.ndst)

    @property
    def is_write(self) -> np.ndarray:
        """``[operands]`` whether the operand is a destination."""
        unit = self.unit
        return np.arange(len(unit)) - self.first[unit] >= self.nsrc[unit]


def spans(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for consecutive spans of given lengths, the span of each item and its place in it."""
    span = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return span, np.arange(len(span)) - starts[span]


def unique_rows(rows: np.ndarray) -> np.ndarray:
    """Return the rows that differ, sorted."""
    rows = rows[np.lexsort(rows.T[::-1])]
    differs = np.ones(len(rows), bool)
    differs[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return rows[differs]


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the values that differ, sorted; `numpy.unique` would import the masked arrays."""
    return unique_rows(values[:, None])[:, 0]


def partners(schedule: Schedule, rank: int) -> np.ndarray:
    """Find the ranks that touch memory of any rank whose memory ``rank`` touches."""
    n = schedule.n
    touched = np.zeros(n, bool)
    touched[rank] = True
    for folds in schedule.rounds(np.array([rank])):
        for f in folds:
            if np.any(f.where) and np.any(f.count):
                for piece in f.pieces:
                    touched[np.asarray(piece.rank) % n] = True
    everyone = schedule.all_ranks()
    involved = touched.copy()
    for folds in schedule.rounds(everyone):
        for f in folds:
            for piece in f.pieces:
                if piece.rank is not everyone:
                    hit = touched[np.asarray(piece.rank) % n]
                    involved |= hit if f.where is True else hit & np.asarray(f.where, bool)
    return np.flatnonzero(involved)


def remote_buffers(schedule: Schedule) -> set[Buffer]:
    """Tell which user buffers are ever touched by a rank other than their owner."""
    everyone = schedule.all_ranks()
    found: set[Buffer] = set()
    for folds in schedule.rounds(everyone):
        for f in folds:
            for piece in f.pieces:
                if piece.buffer not in found and piece.rank is not everyone:
                    away = (np.asarray(piece.rank) - everyone) % schedule.n != 0
                    if np.any(away & np.asarray(f.where, bool) & (np.asarray(f.count) > 0)):
                        found.add(piece.buffer)
    return found


def build_table(schedule: Schedule, focus: int | None = None) -> FoldTable:
    """Expand the folds of all ranks into unit folds, or those that touch memory that one touches.

    Args:
        schedule: What to expand.
        focus: The one rank; None stands for all.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    ranks = schedule.all_ranks() if focus is None else partners(schedule, focus)
    lines = _lines_of(schedule, ranks)
    counts = lines.counts
    if focus is not None:
        counts = counts * _near(schedule, lines, int(np.flatnonzero(ranks == focus)[0]), focus)
    line, column = np.nonzero(counts)
    fold, offset = spans(counts[line, column])
    line, column = line[fold], column[fold]
    unit, position = spans((lines.nsrc + lines.ndst)[line])
    piece, at = lines.first[line[unit]] + position, column[unit]
    buffer, chunk = lines.buffer[piece], lines.chunk[piece, at] + offset[unit]
    table = FoldTable(
        n=schedule.n,
        lines=len(lines.round),
        line_round=lines.round,
        owner=ranks[column],
        line=line,
        tree=lines.tree[line],
        nsrc=lines.nsrc[line],
        ndst=lines.ndst[line],
        rank=lines.rank[piece, at] % schedule.n,
        buffer=buffer,
        chunk=np.where(buffer == Buffer.TMP.value, chunk, chunk % max(1, schedule.chunks)),
    )
    _check(schedule, table)
    return _resolve_acc(table, schedule)


class _Lines(NamedTuple):
    """The folds of some ranks as the schedule has them, each over all of its chunks."""

    # round, tree, nsrc, ndst, first: ``[lines]``, the last one the number of the first piece
    round: np.ndarray
    tree: np.ndarray
    nsrc: np.ndarray
    ndst: np.ndarray
    first: np.ndarray
    counts: np.ndarray  # ``[lines, ranks]`` chunks; 0 where a rank takes no part
    line: np.ndarray  # ``[pieces]`` line of each piece
    buffer: np.ndarray  # ``[pieces]``
    rank: np.ndarray  # ``[pieces, ranks]``, likewise chunk; before they are taken modulo
    chunk: np.ndarray


def _lines_of(schedule: Schedule, ranks: np.ndarray) -> _Lines:
    """List the folds of some ranks."""
    rounds = [(i, f) for i, folds in enumerate(schedule.rounds(ranks)) for f in folds]
    number, folds = [i for i, _ in rounds], [f for _, f in rounds]
    width = len(ranks)

    def whole(number: Vector) -> Vector:
        if not isinstance(number, int) and np.shape(number) not in ((), (width,)):
            raise ScheduleError(
                f"{schedule}: round {rounds[i][0]}: {number!r} has shape {np.shape(number)}, "
                f"expected one number, or one for each of {width} ranks"
            )
        return number

    nsrc = np.array([len(f.srcs) for f in folds], np.int64)
    ndst = np.array([len(f.dsts) for f in folds], np.int64)
    line, _ = spans(nsrc + ndst)
    rank, chunk = np.empty((2, len(line), width), np.int64)
    buffer = np.empty(len(line), np.int64)
    counts = np.empty((len(folds), width), np.int64)
    row = 0
    for i, f in enumerate(folds):
        count = whole(f.count)
        counts[i] = count if f.where is True else np.where(whole(f.where), count, 0)
        for piece in f.pieces:
            rank[row], chunk[row] = whole(piece.rank), whole(piece.chunk)
            buffer[row] = int(piece.buffer)
            row += 1
    most = max(1, schedule.chunks, schedule.slots)
    for odd in (counts.min(initial=0), counts.max(initial=0)):
        if not 0 <= odd <= most:
            bad = number[int(np.argwhere(counts == odd)[0][0])]
            raise ScheduleError(
                f"{schedule}: round {bad}: a fold covers {odd} chunks, expected 0 to {most}"
            )
    tree = np.array([f.tree for f in folds], bool)
    first = np.cumsum(nsrc + ndst) - nsrc - ndst
    round_ = np.array(number, np.int64)
    return _Lines(round_, tree, nsrc, ndst, first, counts, line, buffer, rank, chunk)


def _near(schedule: Schedule, lines: _Lines, column: int, focus: int) -> np.ndarray:
    """Tell which folds overlap the memory of a rank or the hull of what it touches elsewhere.

    The rank is ``focus``, in column ``column``; the result has the shape ``[lines, ranks]``.
    """
    scratch = (lines.buffer == Buffer.TMP.value)[:, None]
    counts = lines.counts[lines.line]
    chunks = max(1, schedule.chunks)
    rank = 2 * (lines.rank % schedule.n) + scratch
    low = np.where(scratch, lines.chunk, lines.chunk % chunks)
    high = low + counts
    wraps = ~scratch & (high > chunks)
    low, high = np.where(wraps, 0, low), np.where(wraps, chunks, high)
    mine = counts[:, column] > 0
    hull_low = np.full(2 * schedule.n, np.iinfo(np.int64).max)
    hull_high = np.full(2 * schedule.n, -1)
    np.minimum.at(hull_low, rank[mine, column], low[mine, column])
    np.maximum.at(hull_high, rank[mine, column], high[mine, column])
    hull_low[2 * focus : 2 * focus + 2] = 0
    hull_high[2 * focus : 2 * focus + 2] = chunks, schedule.slots
    hit = (low < hull_high[rank]) & (high > hull_low[rank]) & (counts > 0)
    near = np.zeros(lines.counts.shape, bool)
    np.logical_or.at(near, lines.line, hit)
    near[:, column] = True
    return near


def _check(schedule: Schedule, table: FoldTable) -> None:
    bad = (table.buffer == Buffer.TMP.value) & ((table.chunk < 0) | (table.chunk >= schedule.slots))
    if np.any(bad):
        i = int(np.flatnonzero(bad)[0])
        unit = int(table.unit[i])
        raise ScheduleError(
            f"{schedule}: rank {table.owner[unit]}, round {table.line_round[table.line[unit]]}: "
            f"scratch slot {table.chunk[i]} on rank {table.rank[i]} is outside the "
            f"{schedule.slots} declared slots"
        )


def _resolve_acc(table: FoldTable, schedule: Schedule) -> FoldTable:
    """Replace ACC by IN or OUT: IN until the round after the piece was first written."""
    acc = table.buffer == Buffer.ACC.value
    if not np.any(acc):
        return table
    write = table.is_write
    round_ = table.line_round[table.line[table.unit]]
    cell = table.rank * max(1, schedule.chunks) + table.chunk
    never = np.iinfo(np.int64).max
    first_write = np.full(schedule.n * max(1, schedule.chunks), never, np.int64)
    target = write & (acc | (table.buffer == Buffer.OUT.value))
    np.minimum.at(first_write, cell[target], round_[target])
    user = table.buffer != Buffer.TMP.value
    written = np.zeros(len(cell), bool)
    written[user] = first_write[cell[user]] < round_[user]
    table.buffer = np.where(
        acc, np.where(write | written, Buffer.OUT.value, Buffer.IN.value), table.buffer
    )
    return table

"""The folds of a schedule as flat arrays, one entry per chunk, or per stretch of chunks.

A `FoldTable` lists *unit folds*: folds of a single chunk, or of a stretch of chunks that no other
access in the table overlaps in part. Unit fold i is executed by ``owner[i]``
at line ``line[i]`` and uses the operands ``first[i] .. first[i] + nsrc[i] + ndst[i]``, sources
before destinations. Everything the compiler does is then arithmetic on whole columns.

NumPy is given the values of enumerations, never their members, and no rows to make unique: it would
call Python code then, and swallow an exception raised there, which may be that of a signal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    # ``[units]`` whether the fold has several sources, of which some may not be listed
    combines: np.ndarray
    width: np.ndarray  # ``[units]`` chunks that each covers
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

    def units(self, chosen: np.ndarray) -> FoldTable:
        """Return a table of some of the unit folds."""
        operands = chosen[self.unit]
        per_unit = ("owner", "line", "tree", "nsrc", "ndst", "combines", "width")
        return replace(
            self,
            **{name: getattr(self, name)[chosen] for name in per_unit},
            **{name: getattr(self, name)[operands] for name in ("rank", "buffer", "chunk")},
        )


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


def modulo(numbers: np.ndarray, n: int) -> np.ndarray:
    """Return numbers modulo n; most lie in the range already, and division is slow."""
    inside = numbers.min(initial=0) >= 0 and numbers.max(initial=0) < n
    return numbers if inside else numbers % n


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the values that differ, sorted; `numpy.unique` would import the masked arrays."""
    return unique_rows(values[:, None])[:, 0]


def remote_buffers(schedule: Schedule) -> set[Buffer]:
    """Tell which user buffers are ever touched by a rank other than their owner."""
    if (lines := schedule.relative) is not None:
        return {Buffer(b) for b in distinct(lines.buffer[lines.away(schedule.n)]).tolist()}
    found: set[Buffer] = set()
    for block in schedule.blocks(schedule.all_ranks()):
        for f in block.folds:
            for piece in f.pieces:
                if piece.buffer not in found and piece.rank is not block.owner:
                    away = modulo(np.asarray(piece.rank) - block.owner, schedule.n) != 0
                    if np.any(away & np.asarray(f.where, bool) & (np.asarray(f.count) > 0)):
                        found.add(piece.buffer)
    return found


def build_table(schedule: Schedule) -> FoldTable:
    """Expand the folds of all ranks into unit folds.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    ranks = schedule.all_ranks()
    table = expand(schedule, lines_of(schedule, ranks), ranks)
    check_slots(schedule, table)
    return resolve_acc(table, schedule)


def expand(
    schedule: Schedule,
    lines: Lines,
    ranks: np.ndarray,
    cut: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> FoldTable:
    """Expand the folds of some ranks; ACC stays.

    ``cut`` is fold, offset and width of the stretches that they are cut into, instead of chunks.
    """
    line, column = np.nonzero(lines.counts)
    fold, offset = spans(lines.counts[line, column]) if cut is None else cut[:2]
    width = np.ones(len(fold), np.int64) if cut is None else cut[2]
    line, column = line[fold], column[fold]
    unit, position = spans((lines.nsrc + lines.ndst)[line])
    piece, at = lines.first[line[unit]] + position, column[unit]
    buffer, chunk = lines.buffer[piece], lines.chunk[piece, at] + offset[unit]
    return FoldTable(
        n=schedule.n,
        lines=len(lines.round),
        line_round=lines.round,
        owner=ranks[column],
        line=line,
        tree=lines.tree[line],
        nsrc=lines.nsrc[line],
        ndst=lines.ndst[line],
        combines=lines.nsrc[line] > 1,
        width=width,
        rank=lines.rank[piece, at] % schedule.n,
        buffer=buffer,
        chunk=np.where(buffer == Buffer.TMP.value, chunk, chunk % max(1, schedule.chunks)),
    )


class Lines(NamedTuple):
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


def lines_of(schedule: Schedule, ranks: np.ndarray) -> Lines:
    """List the folds of some ranks."""
    blocks = list(schedule.blocks(ranks))
    folds = [f for block in blocks for f in block.folds * block.rounds]
    rounds, sizes = np.array([(b.rounds, len(b.folds)) for b in blocks], np.int64).reshape(-1, 2).T
    number = np.repeat(np.arange(rounds.sum()), np.repeat(sizes, rounds))
    nsrc = np.array([len(f.srcs) for f in folds], np.int64)
    ndst = np.array([len(f.dsts) for f in folds], np.int64)
    line, _ = spans(nsrc + ndst)
    first = np.cumsum(nsrc + ndst) - nsrc - ndst
    buffer = np.array([p.buffer for f in folds for p in f.pieces], np.int64)
    rank, chunk = np.zeros((2, len(line), len(ranks)), np.int64)
    counts = np.zeros((len(folds), len(ranks)), np.int64)
    begin = 0
    for block in blocks:
        column = block.column
        whole = _Whole(schedule, begin and int(number[begin - 1]) + 1, len(ranks[column]))
        for i, f in enumerate(block.folds, begin):
            at = i + block.round * len(block.folds)
            count = whole(f.count)
            counts[at, column] = count if f.where is True else np.where(whole(f.where), count, 0)
            pieces = f.pieces
            rows = first[at] + np.arange(len(pieces)).reshape(-1, *[1] * np.ndim(at))
            rank[rows, column] = whole.rows([p.rank for p in pieces])
            chunk[rows, column] = whole.rows([p.chunk for p in pieces])
        begin += block.rounds * len(block.folds)
    _check_counts(schedule, number, counts)
    tree = np.array([f.tree for f in folds], bool)
    return Lines(number, tree, nsrc, ndst, first, counts, line, buffer, rank, chunk)


class _Whole(NamedTuple):
    """What numbers of a round have to be: one number, or one for each rank that takes part."""

    schedule: Schedule
    round: int
    width: int

    def __call__(self, number: Vector) -> Vector:
        """Return the number; ScheduleError if there are more or fewer."""
        if not isinstance(number, int) and np.shape(number) not in ((), (self.width,)):
            raise ScheduleError(
                f"{self.schedule}: round {self.round}: {number!r} has shape {np.shape(number)}, "
                f"expected one number, or one for each of {self.width} ranks"
            )
        return number

    def rows(self, numbers: list[Vector]) -> np.ndarray:
        """Return ``[numbers, 1 or ranks]`` what several numbers are."""
        if all(type(number) is int for number in numbers):
            return np.array(numbers, np.int64)[:, None]
        found = np.empty((len(numbers), self.width), np.int64)
        for row, number in zip(found, numbers, strict=True):
            row[:] = self(number)
        return found


def _check_counts(schedule: Schedule, number: np.ndarray, counts: np.ndarray) -> None:
    """Raise ScheduleError if a fold covers more chunks than there are, or fewer than none."""
    most = max(1, schedule.chunks, schedule.slots)
    for odd in (counts.min(initial=0), counts.max(initial=0)):
        if not 0 <= odd <= most:
            bad = number[int(np.argwhere(counts == odd)[0][0])]
            raise ScheduleError(
                f"{schedule}: round {bad}: a fold covers {odd} chunks, expected 0 to {most}"
            )


def check_slots(schedule: Schedule, table: FoldTable) -> None:
    """Raise ScheduleError if a fold names a slot that the schedule does not declare."""
    beyond = table.chunk + table.width[table.unit] > schedule.slots
    bad = (table.buffer == Buffer.TMP.value) & ((table.chunk < 0) | beyond)
    if np.any(bad):
        i = int(np.flatnonzero(bad)[0])
        unit = int(table.unit[i])
        raise ScheduleError(
            f"{schedule}: rank {table.owner[unit]}, round {table.line_round[table.line[unit]]}: "
            f"scratch slot {table.chunk[i]} on rank {table.rank[i]} is outside the "
            f"{schedule.slots} declared slots"
        )


def resolve_acc(table: FoldTable, schedule: Schedule) -> FoldTable:
    """Replace ACC by IN or OUT: IN until the round after the piece was first written."""
    acc = table.buffer == Buffer.ACC.value
    if not np.any(acc):
        return table
    write = table.is_write
    round_ = table.line_round[table.line[table.unit]]
    cell = table.rank * max(1, schedule.chunks) + table.chunk
    target = write & (acc | (table.buffer == Buffer.OUT.value))
    first = Marks(cell[target], round_[target])
    written = first.value(cell, np.iinfo(np.int64).max) < round_
    table.buffer = np.where(
        acc, np.where(write | written, Buffer.OUT.value, Buffer.IN.value), table.buffer
    )
    return table


class Marks:
    """Some cells of a large memory, and a number for each: the least of those given."""

    def __init__(self, cell: np.ndarray, number: np.ndarray | None = None) -> None:
        """Remember cells; they may come several times."""
        number = np.zeros(len(cell), np.int64) if number is None else number
        order = np.lexsort((number, cell))
        cell, number = cell[order], number[order]
        first = np.ones(len(cell), bool)
        first[1:] = cell[1:] != cell[:-1]
        self.cells: np.ndarray = cell[first]
        self.numbers: np.ndarray = number[first]

    def _places(self, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(self.cells, cell)
        at[at == len(self.cells)] = 0
        return at, self.cells[at] == cell

    def value(self, cell: np.ndarray, otherwise: int) -> np.ndarray:
        """Return the numbers of cells."""
        if not len(self.cells):
            return np.full(len(cell), otherwise)
        at, known = self._places(cell)
        return np.where(known, self.numbers[at], otherwise)

    def has(self, cell: np.ndarray) -> np.ndarray:
        """Tell which cells are marked."""
        return self._places(cell)[1] if len(self.cells) else np.zeros(len(cell), bool)

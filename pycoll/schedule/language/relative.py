"""Schedules in which every rank does what rank 0 does, moved by its own number.

Most of the algorithms with a fold for each peer are so: whoever a fold reads or writes is so many
ranks ahead of its owner, or one and the same rank for all. `relative_lines` finds that out by
calling the generator with a `Relative` in place of a rank. All that can be done with one is to add
a number and to take one away; code that asks anything else of its rank, such as whether it is the
root, raises TypeError, and the schedule is not relative. So what is found holds for every rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pycoll.schedule.language.author_errors import author_errors
from pycoll.schedule.language.pieces import Buffer, Fold, Relative, Steps

_WORD = np.int64


class RelativeLines(NamedTuple):
    """The folds of all ranks of a relative schedule, each over all of its chunks."""

    # round, tree, nsrc, ndst, count: ``[lines]``
    round: np.ndarray
    tree: np.ndarray
    nsrc: np.ndarray
    ndst: np.ndarray
    count: np.ndarray
    # rank, buffer, chunk: ``[pieces]``, those of a line together, sources first
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray
    # moves, moves_chunk: ``[pieces]`` whether the owner's number is to be added
    moves: np.ndarray
    moves_chunk: np.ndarray

    def away(self, n: int) -> np.ndarray:
        """``[pieces]`` whether others than its owner touch this memory, on any rank."""
        happens = np.repeat(self.count > 0, self.nsrc + self.ndst)
        return happens & np.where(self.moves, self.rank % n != 0, n > 1)


class _Columns:
    """The columns of `RelativeLines` as they grow."""

    def __init__(self) -> None:
        self.lines = [array("q") for _ in range(5)]
        self.pieces = [array("q") for _ in range(5)]

    def add(self, number: int, f: Fold) -> bool:
        """Add one fold; tell whether it fits."""
        where, count = f.where, f.count
        if not isinstance(where, (bool, np.bool_)) or not isinstance(count, (int, np.integer)):
            return False
        line = number, f.tree, len(f.srcs), len(f.dsts), count if where else 0
        for column, value in zip(self.lines, line, strict=True):
            column.append(value)
        rank, buffer, chunk, moves, moves_chunk = self.pieces
        pieces = f.srcs + f.dsts
        buffer.extend([piece.buffer for piece in pieces])
        for values, column, moving in (
            ([piece.rank for piece in pieces], rank, moves),
            ([piece.chunk for piece in pieces], chunk, moves_chunk),
        ):
            relative = [type(value) is Relative for value in values]
            ahead = [v.ahead if moved else v for v, moved in zip(values, relative, strict=True)]
            if not all(issubclass(kind, (int, np.integer)) for kind in set(map(type, ahead))):
                return False
            column.extend(ahead)
            moving.extend(relative)
        return True

    def add_steps(self, number: int, steps: Steps) -> bool:
        """Add the folds of all steps at once; tell whether they fit."""
        size = len(steps.over)
        f = steps.make(np.array(steps.over, _WORD))
        where, count = f.where, f.count
        if not isinstance(where, (bool, np.bool_)) or not isinstance(count, (int, np.integer)):
            return False
        rounds = np.full(size, number) + (0 if steps.at_once else np.arange(size))
        line = rounds, f.tree, len(f.srcs), len(f.dsts), count if where else 0
        for column, value in zip(self.lines, line, strict=True):
            column.frombytes(np.broadcast_to(value, size).astype(_WORD).tobytes())
        table = np.empty((5, size, len(f.srcs) + len(f.dsts)), _WORD)
        for i, piece in enumerate(f.srcs + f.dsts):
            values = piece.rank, piece.chunk
            moving = [type(value) is Relative for value in values]
            ahead = [v.ahead if m else v for v, m in zip(values, moving, strict=True)]
            for row, value in enumerate((ahead[0], piece.buffer.value, ahead[1], *moving)):
                table[row, :, i] = value
        for column, values in zip(self.pieces, table, strict=True):
            column.frombytes(values.tobytes())
        return True


def relative_lines(yielded: Iterator[Any], n: int, chunks: int, most: int) -> RelativeLines | None:
    """Collect the folds that a generator yields for a `Relative` rank; None if they do not fit.

    Chunks that move with the rank have to come around as the ranks do: there is one for each.
    ``most`` is how many folds or rounds there may be.

    Raises:
        ScheduleError: If the generator asks which rank it is for, or fails otherwise.
    """
    columns, number = _Columns(), 0
    for item in yielded:
        coming = len(item.over) if isinstance(item, Steps) else 1
        if max(number, len(columns.lines[0])) + coming > most:
            return None
        if isinstance(item, Steps):
            if item.during is not None:
                return None
            with author_errors("steps", item.make):
                if len(item.over) and not columns.add_steps(number, item):
                    return None
            number += min(1, len(item.over)) if item.at_once else len(item.over)
            continue
        for f in [item] if isinstance(item, Fold) else item:
            if not isinstance(f, Fold) or not columns.add(number, f):
                return None
        number += 1
    found = [np.frombuffer(c, _WORD) for c in (*columns.lines, *columns.pieces)]
    lines = RelativeLines(*found)
    lines = lines._replace(
        tree=lines.tree.astype(bool),
        moves=lines.moves.astype(bool),
        moves_chunk=lines.moves_chunk.astype(bool),
    )
    if np.any(lines.moves_chunk & ((lines.buffer == Buffer.TMP.value) | (chunks != n))):
        return None
    return lines

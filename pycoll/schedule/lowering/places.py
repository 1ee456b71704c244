"""The places that one rank touches on others, and what others access there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.lowering.table import FoldTable, distinct

_TMP = Buffer.TMP.value
INPUTS = Buffer.IN.value, Buffer.ACC.value
RESULTS = Buffer.OUT.value, Buffer.ACC.value


def one_of(buffer: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
    """Tell which buffers are one of two."""
    return (buffer == pair[0]) | (buffer == pair[1])


class Found(NamedTuple):
    """Operands of others' folds, in any order and perhaps more than once."""

    # line, piece, owner, offset: ``[operands]``, the piece counted over all lines
    line: np.ndarray
    piece: np.ndarray
    owner: np.ndarray
    offset: np.ndarray
    width: np.ndarray  # ``[operands]`` chunks from there on
    # rank, buffer, chunk: ``[operands]``
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray


class Places:
    """The places that a rank touches elsewhere, IN and OUT being one, and whether it writes."""

    def __init__(self, schedule: Schedule, own: FoldTable, rank: int) -> None:
        self.n: int = schedule.n
        self.chunks: int = max(1, schedule.chunks)
        self.focus: int = rank
        self.span: int = max(self.chunks, schedule.slots) + 1
        away = own.rank != rank
        number = self.number(own.rank[away], own.buffer[away] == _TMP, own.chunk[away])
        self.cell: np.ndarray = distinct(number)
        self.written: np.ndarray = np.zeros(len(self.cell), bool)
        self.written[np.searchsorted(self.cell, number[own.is_write[away]])] = True
        # Places whose inputs it reads: others may read the results there.
        self.asked: np.ndarray = np.zeros(len(self.cell), bool)
        inputs = one_of(own.buffer[away], INPUTS)
        self.asked[np.searchsorted(self.cell, number[inputs & ~own.is_write[away]])] = True

    def number(self, rank: np.ndarray, scratch: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Number places."""
        return (rank * 2 + scratch) * self.span + chunk

    def split(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rank, whether it is scratch memory, and chunk of the cells."""
        piece, chunk = np.divmod(self.cell, self.span)
        return piece // 2, piece % 2 == 1, chunk

    def near(self, found: Found, write: np.ndarray) -> np.ndarray:
        """Tell which of others' accesses the rank has to know of."""
        number = self.number(found.rank, found.buffer == _TMP, found.chunk)
        at = np.minimum(np.searchsorted(self.cell, number), max(0, len(self.cell) - 1))
        if not len(self.cell):
            return found.rank == self.focus
        result = one_of(found.buffer, RESULTS)
        known = (self.cell[at] == number) & (write | self.written[at] | (self.asked[at] & result))
        return known | (found.rank == self.focus)

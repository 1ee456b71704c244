"""What ranks have to know of a schedule to cut its messages alike: each has a plan of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer, Fold, Schedule
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.table import modulo

_TMP = Buffer.TMP.value


class Extent(NamedTuple):
    """Numbers of a schedule that follow from it alone, so they are the same on every rank."""

    message: int  # chunks that a message of any rank has at most
    slots: int  # scratch slots of the rank that needs most of them, or about as many


def extent_of(schedule: Schedule) -> Extent:
    """Look at the folds of all ranks.

    Raises:
        ScheduleError: If the algorithm raises anything, or yields what is no fold.
    """
    if (lines := schedule.relative) is not None:
        return _of_relative(schedule, lines)
    message = slots = 0
    for block in schedule.blocks(schedule.all_ranks()):
        needed = np.zeros(block.owner.shape, np.int64)
        for f in block.folds:
            count = np.broadcast_to(np.where(f.where, f.count, 0), block.owner.shape)
            sources, ends = _away(f, block.owner, schedule.n)
            moves = np.any(sources, axis=0) | np.any(ends, axis=0)
            message = max(message, int(count[moves].max(initial=0)))
            own = [~end & (p.buffer is Buffer.TMP) for end, p in zip(ends, f.dsts, strict=True)]
            needed += count * _slots(
                sources.sum(axis=0), len(sources), ~np.all(ends, axis=0), np.any(own, axis=0)
            )
        slots = max(slots, int(needed.max(initial=0)))
    return Extent(message, schedule.slots + slots)


def _away(f: Fold, owner: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Tell which sources and which destinations lie on other ranks than the owner."""
    away = np.zeros((len(f.pieces), *owner.shape), bool)
    for row, piece in zip(away, f.pieces, strict=True):
        if piece.rank is not owner:
            row[...] = modulo(np.asarray(piece.rank) - owner, n) != 0
    return away[: len(f.srcs)], away[len(f.srcs) :]


def _of_relative(schedule: Schedule, lines: RelativeLines) -> Extent:
    size, arity = len(lines.nsrc), lines.nsrc + lines.ndst
    line = np.repeat(np.arange(size), arity)
    source = np.arange(len(line)) - (np.cumsum(arity) - arity)[line] < lines.nsrc[line]
    away = lines.away(schedule.n)

    def number(pieces: np.ndarray) -> np.ndarray:
        return np.bincount(line[pieces], minlength=size)

    fetched = number(away & source)
    fetched -= number(away & source & ~lines.moves) >= schedule.n  # one of them is the owner's
    kept, own = number(~away & ~source) > 0, number(~away & ~source & (lines.buffer == _TMP)) > 0
    of_round = np.zeros(int(lines.round.max(initial=0)) + 1, np.int64)
    np.add.at(of_round, lines.round, lines.count * _slots(fetched, lines.nsrc, kept, own))
    message = int(lines.count[number(away) > 0].max(initial=0))
    return Extent(message, schedule.slots + int(of_round.max()))


def _slots(
    fetched: np.ndarray, nsrc: np.ndarray | int, kept: np.ndarray, in_slot: np.ndarray
) -> np.ndarray:
    """Return the slots that a fold needs for each of its chunks, or about as many.

    Args:
        fetched: How many of its sources are remote.
        nsrc: How many it has.
        kept: Whether a destination is the owner's own.
        in_slot: Whether such a one is a scratch slot, to which the first source can come.
    """
    reduced = fetched + ~kept - (in_slot & (fetched > 0))
    return np.where(np.asarray(nsrc) == 1, np.where(kept, 0, fetched), reduced)

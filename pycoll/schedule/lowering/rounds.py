"""What others do to the places that a rank touches, found round by round.

Folds stay as they are, over many chunks, until all are found that matter. Then they are cut into
stretches, so that no two of them overlap in part; so what is listed grows with the number of folds,
not with that of chunks.
"""

from __future__ import annotations

import numpy as np

from pycoll.schedule.ir import Buffer, Fold, Schedule, Vector
from pycoll.schedule.lowering.places import INPUTS, Found, Places, one_of
from pycoll.schedule.lowering.stretches import Stretches, stretches
from pycoll.schedule.lowering.table import FoldTable, Lines, Marks, expand, modulo

_TMP = Buffer.TMP.value


def own_and_others(
    schedule: Schedule, lines: Lines, rank: int, whole: bool
) -> tuple[FoldTable, Found]:
    """Expand a rank's folds, and find others' accesses to what it touches."""
    own = _ranges(schedule, lines, rank)
    found = _near_folds(schedule, lines, own, rank, whole)
    n, chunks = schedule.n, max(1, schedule.chunks)
    everything = Found(*map(np.concatenate, zip(own, found, strict=True)))
    cut = stretches(everything, n, chunks, max(chunks, schedule.slots) + 1)
    mine = np.flatnonzero(lines.counts[:, 0])
    table = expand(schedule, lines, np.array([rank]), cut.of(mine * n + rank))
    return table, _accesses(found, cut, lines, Places(schedule, table, rank), whole)


def _ranges(schedule: Schedule, lines: Lines, rank: int) -> Found:
    """List the pieces of a rank's own folds, each over all of its chunks."""
    count = lines.counts[lines.line, 0]
    piece = np.flatnonzero(count)
    buffer, chunk = lines.buffer[piece], lines.chunk[piece, 0]
    return Found(
        line=lines.line[piece],
        piece=piece,
        owner=np.full(len(piece), rank),
        offset=np.zeros(len(piece), np.int64),
        width=count[piece],
        rank=lines.rank[piece, 0] % schedule.n,
        buffer=buffer,
        chunk=np.where(buffer == _TMP, chunk, chunk % max(1, schedule.chunks)),
    )


def _near_folds(schedule: Schedule, lines: Lines, own: Found, focus: int, whole: bool) -> Found:
    """Find the pieces of others that may be near, each over all chunks of its fold."""
    hulls = _hulls(schedule, lines, own, focus)
    touched = (hulls[1] > 0).reshape(2, schedule.n, 2).any(axis=(0, 2))  # ranks
    found: list[Found] = []
    begin = 0
    for block in schedule.blocks(schedule.all_ranks()):
        owner = block.owner
        for i, f in enumerate(block.folds, begin):
            line = i + block.round * len(block.folds)
            count = np.broadcast_to(np.where(f.where, f.count, 0), owner.shape)
            busy = np.flatnonzero(count)
            busy = busy[owner[busy] != focus]
            if len(busy):
                at = np.broadcast_to(line, owner.shape)[busy]
                near = _of_fold(schedule, f, busy, count[busy], touched, hulls, whole)
                column, at = near.owner, at[near.owner]
                piece = near.piece + lines.first[at]
                found.append(near._replace(line=at, piece=piece, owner=owner[busy[column]]))
        begin += block.rounds * len(block.folds)
    none = np.zeros(0, np.int64)
    return Found(*map(np.concatenate, zip(*found, strict=True))) if found else Found(*[none] * 8)


def _hulls(
    schedule: Schedule, lines: Lines, own: Found, focus: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each rank and kind of memory, and for reads and writes, what is touched in between.

    The result is ``[2, 2 n]``: row 1 for accesses that write.
    """
    n, chunks = schedule.n, max(1, schedule.chunks)
    low = np.full((2, 2 * n), np.iinfo(np.int64).max)
    high = np.full((2, 2 * n), -1)
    scratch = own.buffer == _TMP
    at, end = 2 * own.rank + scratch, own.chunk + own.width
    wraps = ~scratch & (end > chunks)
    start, end = np.where(wraps, 0, own.chunk), np.where(wraps, chunks, end)
    write = own.piece >= (lines.first + lines.nsrc)[own.line]
    for row, pieces in ((0, write | one_of(own.buffer, INPUTS)), (1, slice(None))):
        np.minimum.at(low[row], at[pieces], start[pieces])
        np.maximum.at(high[row], at[pieces], end[pieces])
    low[:, 2 * focus : 2 * focus + 2] = 0
    high[:, 2 * focus : 2 * focus + 2] = np.iinfo(np.int64).max
    return low, high


def _of_fold(
    schedule: Schedule,
    f: Fold,
    busy: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    hulls: tuple[np.ndarray, np.ndarray],
    whole: bool,
) -> Found:
    """List the pieces of one fold that may be near.

    ``busy`` are the entries of its vectors that take part, and ``count`` is of each of them. Lines
    are 0, pieces are counted within the fold, and owners are indices of ``busy``.
    """
    chunks = max(1, schedule.chunks)
    scratch = np.array([p.buffer is Buffer.TMP for p in f.pieces])[:, None]
    rank = modulo(_matrix([p.rank for p in f.pieces], busy), schedule.n)
    some = np.flatnonzero(touched[rank].any(axis=0))
    rank, busy, count = rank[:, some], busy[some], count[some]
    chunk = _matrix([p.chunk for p in f.pieces], busy)
    chunk = np.where(scratch, chunk, chunk % chunks)
    write = (np.arange(len(scratch)) >= len(f.srcs)).astype(int)[:, None]
    at = 2 * rank + scratch
    low, high = (hull[write, at] for hull in hulls)
    inside = (chunk < high) & (chunk + count > low)
    inside |= ~scratch & (chunk + count - chunks > low) & (high > 0)
    if whole:
        inside[:] = inside.any(axis=0)
    elif len(f.srcs) == 1:
        inside[0] = inside.any(axis=0)
    piece, column = np.nonzero(inside)
    none = np.zeros(len(piece), np.int64)
    buffer = np.array([p.buffer.value for p in f.pieces])[piece]
    there = rank[piece, column], buffer, chunk[piece, column]
    return Found(none, piece, some[column], none, count[column], *there)


def _matrix(numbers: list[Vector], busy: np.ndarray) -> np.ndarray:
    """Return ``[pieces, entries]`` what the numbers are for some entries."""
    if all(isinstance(number, (int, np.integer)) for number in numbers):
        return np.broadcast_to(np.array(numbers, np.int64)[:, None], (len(numbers), len(busy)))
    whole = np.empty((len(numbers), len(busy)), np.int64)
    for row, number in zip(whole, numbers, strict=True):
        row[:] = number if np.size(number) == 1 else number[busy]
    return whole


def _accesses(found: Found, cut: Stretches, lines: Lines, places: Places, whole: bool) -> Found:
    """Cut others' pieces into their stretches, and keep those that are near."""
    pair, offset, width = cut.of(found.line * places.n + found.owner)
    found = Found(*(column[pair] for column in found))
    there = found.chunk + offset
    there = np.where(found.buffer == _TMP, there, there % places.chunks)
    found = found._replace(offset=offset, width=width, chunk=there)
    source = found.piece < (lines.first + lines.nsrc)[found.line]
    kept = places.near(found, ~source) | (source & (lines.nsrc[found.line] == 1))
    if whole:
        fold = found.line * places.n + found.owner
        kept |= Marks(fold[found.rank == places.focus]).has(fold)
    return Found(*(column[kept] for column in found))

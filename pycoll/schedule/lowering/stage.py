"""Staging: the schedule transformation that serves arrays which peers cannot map.

Every access to another rank's array is redirected to a slot of that rank's *staging buffer*, memory
that all ranks map. Chunks that others read are copied in before entry (line -1); chunks that others
write are copied out at the end (line L); a chunk that the owner writes and others read is stored
twice by the same fold. After the transformation only the owner touches IN and OUT.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.lowering.plan import PlanBuffer
from pycoll.schedule.lowering.table import FoldTable, Marks, remote_buffers


class SlotMap:
    """Which slot of its owner's staging buffer stands for a chunk of a user buffer."""

    def __init__(self, schedule: Schedule) -> None:
        """Lay out scratch slots, then input slots, then output slots.

        Input and output share their slots when both are needed and the algorithm works in place.
        """
        remote = remote_buffers(schedule)
        spec = COLLECTIVES[schedule.collective]
        self.chunks: int = schedule.chunks
        self.share: int = self.chunks // schedule.n
        needs_in = bool(remote & {Buffer.IN, Buffer.ACC})
        needs_out = bool(remote & {Buffer.OUT, Buffer.ACC})
        together = needs_in and needs_out and schedule.algorithm.in_place
        self.own_in: bool = spec.in_layout == OWN and not together
        self.own_out: bool = spec.out_layout == OWN and not together
        in_slots = needs_in * (self.share if self.own_in else self.chunks)
        out_slots = needs_out * (self.share if self.own_out else self.chunks)
        self.first_in: int = schedule.slots
        self.first_out: int = self.first_in if together else self.first_in + in_slots
        self.slots: int = self.first_out + out_slots if needs_out else self.first_in + in_slots

    def slot(self, buffer: int, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Slots of chunks of one user buffer."""
        own = self.own_in if buffer == Buffer.IN else self.own_out
        first = self.first_in if buffer == Buffer.IN else self.first_out
        return first + chunk - (rank * self.share if own else 0)


def stage(table: FoldTable, schedule: Schedule) -> tuple[FoldTable, int]:
    """Redirect every remote access to a staging buffer.

    Returns:
        The new table, whose buffers are those of `PlanBuffer`, and the number of slots it uses.
    """
    slots = SlotMap(schedule)
    remote = table.rank != table.owner[table.unit]
    write = table.is_write
    is_in, is_out = table.buffer == Buffer.IN.value, table.buffer == Buffer.OUT.value
    chunks = max(1, schedule.chunks)
    cell = table.rank * chunks + table.chunk
    width = table.width[table.unit]
    read_in, read_out, written_out = (
        Marks(cell[chosen], width[chosen])
        for chosen in (remote & is_in, remote & is_out & ~write, remote & is_out & write)
    )
    user = is_in | is_out
    by_others = is_out & written_out.has(cell)
    staged = (remote & user) | by_others
    twice = write & ~remote & is_out & ~by_others & read_out.has(cell)
    place = np.where(is_in, slots.slot(Buffer.IN, table.rank, table.chunk), 0)
    place = np.where(is_out, slots.slot(Buffer.OUT, table.rank, table.chunk), place)
    new_chunk = np.where(staged, place, table.chunk)
    new_buffer = np.where(staged | ~user, PlanBuffer.STAGING.value, table.buffer)
    inner = _store_twice(table, new_buffer, new_chunk, twice, place)
    before = _copies(read_in, chunks, Buffer.IN, slots, line=-1)
    after = _copies(written_out, chunks, Buffer.OUT, slots, line=table.lines)
    return _join(table, [before, inner, after]), slots.slots


def _store_twice(
    table: FoldTable, buffer: np.ndarray, chunk: np.ndarray, twice: np.ndarray, place: np.ndarray
) -> dict[str, np.ndarray]:
    """Append a second destination, the staging buffer, to the folds marked in ``twice``."""
    unit = table.unit
    extra = np.flatnonzero(twice)
    order = np.argsort(np.concatenate([unit, unit[extra]]), kind="stable")
    cell = np.full(len(extra), PlanBuffer.STAGING.value)
    return {
        "owner": table.owner,
        "line": table.line,
        "tree": table.tree,
        "combines": table.combines,
        "width": table.width,
        "nsrc": table.nsrc,
        "ndst": table.ndst + np.bincount(unit[extra], minlength=len(table.ndst)),
        "rank": np.concatenate([table.rank, table.rank[extra]])[order],
        "buffer": np.concatenate([buffer, cell])[order],
        "chunk": np.concatenate([chunk, place[extra]])[order],
    }


def _copies(
    marked: Marks, chunks: int, buffer: Buffer, slots: SlotMap, line: int
) -> dict[str, np.ndarray]:
    """Copy each marked stretch between array and staging buffer."""
    rank, chunk = np.divmod(marked.cells, chunks)
    ones = np.ones(len(rank), np.int64)
    inward = buffer == Buffer.IN
    pair = [(buffer, chunk), (PlanBuffer.STAGING, slots.slot(buffer, rank, chunk))]
    (src, src_chunk), (dst, dst_chunk) = pair if inward else pair[::-1]
    return {
        "owner": rank,
        "line": ones * line,
        "tree": np.zeros(len(rank), bool),
        "combines": np.zeros(len(rank), bool),
        "nsrc": ones,
        "ndst": ones,
        "width": marked.numbers,
        "rank": np.repeat(rank, 2),
        "buffer": np.full((len(rank), 2), [int(src), int(dst)]).ravel(),
        "chunk": np.stack([src_chunk, dst_chunk], axis=1).ravel(),
    }


def _join(table: FoldTable, parts: list[dict[str, np.ndarray]]) -> FoldTable:
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return replace(table, **columns)

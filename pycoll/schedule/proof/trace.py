"""Every access that plans make to memory, in an order in which they may happen.

A `Trace` is what the interpreters of peer plans (`interpret`) and of message plans (`rendezvous`)
leave behind, and what the checks of races and values read. Its accesses are sorted by cell, then by
time; time is one linear extension of happens-before. If no two conflicting accesses are unordered,
every other extension gives the same values, so one is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import PlanBuffer
from pycoll.schedule.lowering.table import spans

_NAMES = ("in", "out", "slot")


@dataclass(frozen=True)
class Units:
    """Unit folds, one per chunk, with their accesses."""

    # event, nsrc, ndst, flags: ``[units]`` event that executes the unit, its shape and flags
    event: np.ndarray
    nsrc: np.ndarray
    ndst: np.ndarray
    flags: np.ndarray
    # unit, event_of, write: ``[accesses]`` unit, event, and whether it is a destination
    unit: np.ndarray
    event_of: np.ndarray
    write: np.ndarray
    # rank, buffer, chunk, parity: ``[accesses]`` the cell; parity is that of the call, for slots
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray
    parity: np.ndarray


def unit_folds(
    folds: np.ndarray, operands: np.ndarray, event: np.ndarray, call: np.ndarray
) -> Units:
    """Spread fold instructions over their chunks.

    Args:
        folds: ``[folds]`` instructions; their ``arg`` counts from the start of ``operands``.
        operands: All operands.
        event: ``[folds]`` number of the event of each.
        call: ``[folds]`` call it belongs to.
    """
    nsrc, ndst = folds["nsrc"].astype(np.int64), folds["ndst"].astype(np.int64)
    fold, offset = spans(folds["count"].astype(np.int64))
    unit, place = spans((nsrc + ndst)[fold])
    of = fold[unit]
    operand = operands[folds["arg"].astype(np.int64)[of] + place]
    return Units(
        event=event[fold],
        nsrc=nsrc[fold],
        ndst=ndst[fold],
        flags=folds["flags"][fold],
        unit=unit,
        event_of=event[of],
        write=place >= nsrc[of],
        rank=operand["rank"].astype(np.int64),
        buffer=operand["buffer"].astype(np.int64),
        chunk=operand["chunk"] + offset[unit],
        parity=call[of] % 2,
    )


@dataclass(frozen=True)
class Trace:
    """Accesses sorted by cell, then by time; see the module."""

    promise: Promise  # what the collective promises
    title: str  # schedule and mode, for messages
    aliased: bool  # IN and OUT are the same memory
    pitch: int  # slots that a rank has in the numbering of cells
    # ranks, rounds: ``[events]`` executing rank and round; a user's event has the round -1
    ranks: np.ndarray
    rounds: np.ndarray
    units: Units  # the unit folds; their accesses stand in no particular order
    when: np.ndarray  # ``[events]`` place of each event in the linear extension
    # cell, event, unit, operand, write: ``[accesses]`` sorted; unit and operand number the folds
    # and their operands, and are -1 for the caller
    cell: np.ndarray
    event: np.ndarray
    unit: np.ndarray
    operand: np.ndarray
    write: np.ndarray
    previous: np.ndarray  # ``[accesses]`` index of the last write to the cell before it, or -1
    following: np.ndarray  # ``[accesses]`` for a read, index of the next write to the cell; else -1
    result: np.ndarray  # ``[accesses]`` whether it is the user's read of an output at the end

    def piece(self, cell: int) -> str:
        """Name a cell as plan listings do."""
        chunks, size = self.promise.chunks, self.promise.n * self.promise.chunks
        if cell < 2 * size:
            name = "in/out" if self.aliased else _NAMES[cell // size]
            return f"{name}[{cell % size // chunks}:{cell % chunks}]"
        rank, slot = divmod(cell - 2 * size, self.pitch)
        return f"slot[{rank % self.promise.n}:{slot}]"

    def who(self, event: int) -> str:
        """Name the rank and the round of an event."""
        if self.rounds[event] < 0:
            return f"the caller of rank {self.ranks[event]}"
        return f"rank {self.ranks[event]}, round {self.rounds[event]}"


def _cells(
    promise: Promise,
    aliased: bool,
    buffer: np.ndarray | PlanBuffer,
    rank: np.ndarray,
    chunk: np.ndarray,
) -> np.ndarray:
    """Number the cells of users' arrays: inputs, then outputs (the same numbers when aliased)."""
    size = promise.n * promise.chunks
    cell = rank * promise.chunks + chunk
    return cell if aliased else cell + np.where(buffer == PlanBuffer.OUT, size, 0)


def _stored_onto_itself(units: Units, cell: np.ndarray) -> np.ndarray:
    """Tell which accesses are a copy's store to the array's chunk that it reads: never carried out.

    Every engine skips a copy whose source and destination have the same address.
    """
    arity = units.nsrc + units.ndst
    source = (np.cumsum(arity) - arity)[units.unit]
    same = units.write & (units.nsrc[units.unit] == 1) & (cell == cell[source])
    return same & (units.buffer != PlanBuffer.CELL)


def make_trace(
    promise: Promise,
    title: str,
    aliased: bool,
    events: tuple[np.ndarray, np.ndarray, np.ndarray],
    units: Units,
    users: np.ndarray,
    last: np.ndarray,
) -> Trace:
    """Sort all accesses.

    Args:
        promise: What the collective promises.
        title: Schedule and mode.
        aliased: IN and OUT are the same memory.
        events: Rank, round and place in time of every event.
        units: The unit folds.
        users: Events at which the caller may read and write its arrays.
        last: Those of them that end the last call; they read the outputs.
    """
    ranks, rounds, when = events
    pitch = int(units.chunk.max(initial=0)) + 1
    slot = (units.parity * promise.n + units.rank) * pitch + units.chunk
    cell = np.where(
        units.buffer == PlanBuffer.CELL,
        2 * promise.n * promise.chunks + slot,
        _cells(promise, aliased, units.buffer, units.rank, units.chunk),
    )
    made = np.flatnonzero(~(aliased & _stored_onto_itself(units, cell)))
    inner = np.zeros(len(made), bool)
    columns = [(cell[made], units.event_of[made], units.unit[made], made, units.write[made], inner)]
    for held, buffer in ((promise.in_held, PlanBuffer.IN), (promise.out_held, PlanBuffer.OUT)):
        for at, write in ((users, True), (last, False)):
            if write or buffer == PlanBuffer.OUT:
                i, chunk = np.nonzero(held[ranks[at]])
                found = _cells(promise, aliased, buffer, ranks[at][i], chunk)
                none, flag = np.full(len(i), -1), np.full(len(i), write)
                columns.append((found, at[i], none, none, flag, ~flag))
    cell, event, unit, operand, write, result = (
        np.concatenate(part) for part in zip(*columns, strict=True)
    )
    order = np.argsort((cell * len(when) + when[event]) * 2 + write, kind="stable")
    cell, event, unit, operand, write, result = (
        column[order] for column in (cell, event, unit, operand, write, result)
    )
    previous, following = _neighbours(cell, write)
    return Trace(
        promise, title, aliased, pitch, ranks, rounds, units, when,
        cell, event, unit, operand, write, previous, following, result,
    )  # fmt: skip


def _neighbours(cell: np.ndarray, write: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each access the last write before it, and for each read the next write, or -1."""
    index = np.arange(len(cell))
    starts = np.maximum.accumulate(np.where(np.diff(cell, prepend=-1) != 0, index, 0))
    last = np.maximum.accumulate(np.where(write, index, -1))
    previous = np.concatenate([[-1], last[:-1]])[: len(cell)]
    previous = np.where(previous >= starts, previous, -1)
    following = np.minimum.accumulate(np.where(write, index, len(cell))[::-1])[::-1]
    inside = ~write & (following < len(cell))
    inside[inside] = cell[following[inside]] == cell[inside]
    return previous, np.where(inside, following, -1)


def conflicts(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Pair each access with the last write before it, and each read with the next write after it.

    Returns:
        Indices of the first and the second access of each pair. Every other pair of conflicting
        accesses is joined by a chain of these.

    Raises:
        ScheduleError: If one fold touches a cell twice and writes it, other than to store a chunk
            where it has read that very chunk.
    """
    after, before = np.flatnonzero(trace.previous >= 0), np.flatnonzero(trace.following >= 0)
    first = np.concatenate([trace.previous[after], before])
    second = np.concatenate([after, trace.following[before]])
    same = (trace.event[first] == trace.event[second]) & (trace.unit[first] >= 0)
    fine = (trace.unit[first] == trace.unit[second]) & ~trace.write[first]
    bad = np.flatnonzero(same & ~fine)
    if len(bad):
        i = first[bad[0]]
        raise ScheduleError(
            f"{trace.title}: {trace.who(trace.event[i])}: "
            f"one fold touches {trace.piece(trace.cell[i])} twice, and writes it"
        )
    return first, second

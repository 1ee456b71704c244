"""Every access that plans make to memory, in an order in which they may happen.

A `Trace` is what `interpret_peer` and `interpret_messages` leave behind, and what the checks of
races and values read. Its accesses are sorted by cell, then by time; time is one linear extension
of happens-before. If no two conflicting accesses are unordered, every other extension gives the
same values, so one is enough.
"""

from __future__ import annotations

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import PlanBuffer
from pycoll.schedule.lowering.table import spans

_NAMES = ("in", "out", "slot")


class Units:
    """Unit folds, one per chunk, with their accesses."""

    def __init__(
        self, folds: np.ndarray, operands: np.ndarray, event: np.ndarray, call: np.ndarray
    ) -> None:
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
        # ``[units]``: the event that executes the unit, its shape and flags
        self.event: np.ndarray = event[fold]
        self.nsrc: np.ndarray = nsrc[fold]
        self.ndst: np.ndarray = ndst[fold]
        self.flags: np.ndarray = folds["flags"][fold]
        # ``[accesses]``, with the unit of each; parity is that of the call, for slots
        operand = operands[folds["arg"].astype(np.int64)[of] + place]
        self.unit: np.ndarray = unit
        self.event_of: np.ndarray = event[of]
        self.write: np.ndarray = place >= nsrc[of]
        self.rank: np.ndarray = operand["rank"].astype(np.int64)
        self.buffer: np.ndarray = operand["buffer"].astype(np.int64)
        self.chunk: np.ndarray = operand["chunk"] + offset[unit]
        self.parity: np.ndarray = call[of] % 2


class Trace:
    """Accesses sorted by cell, then by time; see the module."""

    # ``[events]``
    ranks: np.ndarray
    rounds: np.ndarray
    when: np.ndarray
    # ``[accesses]``: unit and operand number the folds and their operands, and are -1 for the
    # caller; result tells that it is the user's read of an output at the end
    cell: np.ndarray
    event: np.ndarray
    unit: np.ndarray
    operand: np.ndarray
    write: np.ndarray
    result: np.ndarray
    # The last write to the cell before each access; for a read the next write to it; or -1
    previous: np.ndarray
    following: np.ndarray

    def __init__(
        self,
        promise: Promise,
        title: str,
        aliased: bool,
        events: tuple[np.ndarray, np.ndarray, np.ndarray],
        units: Units,
        users: np.ndarray,
        last: np.ndarray,
    ) -> None:
        """Sort all accesses.

        Args:
            promise: What the collective promises.
            title: Schedule and mode, for messages.
            aliased: IN and OUT are the same memory.
            events: ``[events]`` rank, round (-1 for users), and place in the linear extension.
            units: The unit folds.
            users: Events at which the caller may read and write its arrays.
            last: Those of them that end the last call; they read the outputs.
        """
        self.promise = promise
        self.title = title
        self.aliased = aliased
        self.units = units
        self.ranks, self.rounds, self.when = events
        # Slots of a rank, in numbers of cells.
        self.pitch: int = int(units.chunk.max(initial=0)) + 1
        slot = (units.parity * promise.n + units.rank) * self.pitch + units.chunk
        cell = np.where(
            units.buffer == PlanBuffer.STAGING,
            2 * promise.n * promise.chunks + slot,
            self._cells(units.buffer, units.rank, units.chunk),
        )
        made = np.flatnonzero(~(aliased & _stored_onto_itself(units, cell)))
        no = np.zeros(len(made), bool)
        parts = [(cell[made], units.event_of[made], units.unit[made], made, units.write[made], no)]
        for held, buffer in ((promise.in_held, PlanBuffer.IN), (promise.out_held, PlanBuffer.OUT)):
            for at, write in ((users, True), (last, False)):
                if write or buffer == PlanBuffer.OUT:
                    i, chunk = np.nonzero(held[self.ranks[at]])
                    found = self._cells(buffer, self.ranks[at][i], chunk)
                    none, flag = np.full(len(i), -1), np.full(len(i), write)
                    parts.append((found, at[i], none, none, flag, ~flag))
        columns = cell, event, *_, write, _ = [np.concatenate(p) for p in zip(*parts, strict=True)]
        order = np.argsort((cell * len(self.when) + self.when[event]) * 2 + write, kind="stable")
        self.cell, self.event, self.unit, self.operand, self.write, self.result = (
            column[order] for column in columns
        )
        self.previous, self.following = _neighbours(self.cell, self.write)

    def _cells(
        self, buffer: np.ndarray | PlanBuffer, rank: np.ndarray, chunk: np.ndarray
    ) -> np.ndarray:
        """Number the cells of users' arrays: inputs, then outputs (the same ones when aliased)."""
        size = self.promise.n * self.promise.chunks
        cell = rank * self.promise.chunks + chunk
        return cell if self.aliased else cell + np.where(buffer == PlanBuffer.OUT, size, 0)

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


def _stored_onto_itself(units: Units, cell: np.ndarray) -> np.ndarray:
    """Tell which accesses are a copy's store to the array's chunk that it reads: never carried out.

    Every engine skips a copy whose source and destination have the same address.
    """
    arity = units.nsrc + units.ndst
    source = (np.cumsum(arity) - arity)[units.unit]
    same = units.write & (units.nsrc[units.unit] == 1) & (cell == cell[source])
    return same & (units.buffer != PlanBuffer.STAGING)


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

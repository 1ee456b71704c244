"""Where ranks that send messages keep what they receive for a fold, and what they send of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.lowering.compile import complete_folds, merge_runs
from pycoll.schedule.lowering.plan import FOLD_COMPLETE, FOLD_TREE, PlanBuffer
from pycoll.schedule.lowering.table import FoldTable, spans


@dataclass(frozen=True)
class Runs:
    """Folds over consecutive chunks, and where their operands lie for their owner."""

    # owner, line, round, count, flags, nsrc: ``[runs]``
    owner: np.ndarray
    line: np.ndarray
    round: np.ndarray
    count: np.ndarray
    flags: np.ndarray
    nsrc: np.ndarray
    # run, source: ``[operands]`` run of each operand, and whether it is a source
    run: np.ndarray
    source: np.ndarray
    # rank, buffer, chunk: ``[operands]`` the piece that the schedule names
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray
    # own_buffer, own_chunk: ``[operands]`` where the owner has it: the piece itself, or a slot
    own_buffer: np.ndarray
    own_chunk: np.ndarray
    slots: np.ndarray  # ``[n]`` slots that each rank needs

    @property
    def remote(self) -> np.ndarray:
        """``[operands]`` whether the piece lies on another rank than the owner."""
        return self.rank != self.owner[self.run]

    def first_of(self, marked: np.ndarray) -> np.ndarray:
        """``[runs]`` first marked operand of each run, or -1."""
        result = np.full(len(self.owner), -1)
        found = np.flatnonzero(marked)[::-1]
        result[self.run[found]] = found
        return result


def runs_of(table: FoldTable) -> Runs:
    """Merge the folds of a table into runs, their operands where the schedule has them."""
    complete = complete_folds(table)
    order, starts, lengths = merge_runs(table, complete)
    head = order[starts]
    arity = (table.nsrc + table.ndst)[head]
    run, place = spans(arity)
    operand = table.first[head][run] + place
    line = table.line[head]
    scratch = table.buffer == Buffer.TMP.value
    buffer = np.where(scratch, PlanBuffer.CELL.value, table.buffer)[operand]
    chunk = table.chunk[operand]
    return Runs(
        owner=table.owner[head],
        line=line,
        round=table.line_round[line] if len(line) else line,
        count=lengths,
        flags=table.tree[head] * FOLD_TREE + complete[head] * FOLD_COMPLETE,
        nsrc=table.nsrc[head],
        run=run,
        source=place < table.nsrc[head][run],
        rank=table.rank[operand],
        buffer=buffer,
        chunk=chunk,
        own_buffer=buffer,
        own_chunk=chunk,
        slots=np.zeros(table.n, np.int64),
    )


def place(schedule: Schedule, runs: Runs, apart: bool) -> Runs:
    """Choose where each owner keeps what it receives or sends: an own destination, or slots."""
    remote, copy = runs.remote, runs.nsrc == 1
    home = runs.first_of(~runs.source & ~remote)
    start = runs.first_of(runs.source)
    fetched = copy & remote[start] if len(start) else copy
    kept = copy & ~fetched  # a copy of an own piece: that piece is what others get
    needs = runs.source & remote & ~((fetched & (home >= 0))[runs.run])
    result = runs.first_of(~runs.source & remote)
    holds_result = ~copy & (home < 0) & (result >= 0)
    needs[result[holds_result]] = True
    needs[_received_at_home(runs, home, apart)] = False
    slot, slots = _allocate(schedule, runs, needs)
    buffer = np.where(needs, PlanBuffer.CELL.value, runs.buffer)
    chunk = np.where(needs, slot, runs.chunk)
    held = np.where(kept, start, np.where(home >= 0, home, np.where(copy, start, result)))
    target = np.where(remote & ~needs, held[runs.run], np.arange(len(runs.run)))
    return replace(runs, own_buffer=buffer[target], own_chunk=chunk[target], slots=slots)


def _received_at_home(runs: Runs, home: np.ndarray, apart: bool) -> np.ndarray:
    """Return the remote sources of reductions that can come to where the result will be.

    One of each reduction, whose own sources are elsewhere: what others read or write there in the
    same round would be a conflict, so nobody misses what was there.
    """
    first = runs.first_of(runs.source & runs.remote)
    at = home[runs.run]
    same = (runs.buffer == runs.buffer[at]) & (runs.chunk == runs.chunk[at])
    taken = runs.first_of(runs.source & ~runs.remote & same) >= 0
    free = apart | (runs.buffer[home] == PlanBuffer.CELL.value)
    return first[(runs.nsrc > 1) & (home >= 0) & (first >= 0) & free & ~taken]


def _allocate(schedule: Schedule, runs: Runs, needs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give slots behind the schedule's own ones; every round begins anew."""
    at = np.flatnonzero(needs)
    run = runs.run[at]
    order = np.lexsort((at, runs.round[run], runs.owner[run]))
    at, run = at[order], run[order]
    size = runs.count[run]
    before = np.cumsum(size) - size
    changed = np.diff(runs.round[run], prepend=-1) != 0
    changed |= np.diff(runs.owner[run], prepend=-1) != 0
    start = np.maximum.accumulate(np.where(changed, np.arange(len(at)), 0))
    slot = np.zeros(len(needs), np.int64)
    slot[at] = schedule.slots + before - before[start]
    slots = np.full(schedule.n, schedule.slots)
    np.maximum.at(slots, runs.owner[run], slot[at] + size)
    return slot, slots

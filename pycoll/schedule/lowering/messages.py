"""From a schedule to plans of matched messages, for transports without shared memory.

Every round has two phases. In the first the owners of folds receive their remote sources; in the
second they send what they have stored for others. All messages of a phase are posted together and
completed by one WAIT, the folds stand between the phases, so a plan needs no buffering anywhere::

    SEND, RECV, ...  WAIT  FOLD, ...  SEND, RECV, ...  WAIT

A copy of an own piece to others needs no second phase, a copy of a remote piece no slot, nor does
the first remote source of a reduction where the result has a place that it can come to. Messages
between two ranks are posted in the same order on both, so they need no tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.lowering.compile import complete_folds, merge_runs
from pycoll.schedule.lowering.near import near_table
from pycoll.schedule.lowering.plan import (
    ALL,
    FOLD_COMPLETE,
    FOLD_TREE,
    INSTR,
    OPERAND,
    Opcode,
    Plan,
    PlanBuffer,
)
from pycoll.schedule.lowering.table import FoldTable, build_table, spans, unique_rows

_FIRST, _FOLDS, _SECOND = 0, 2, 3  # phases; the WAIT behind one stands at the number after it


def message_plan(schedule: Schedule, rank: int, *, apart: bool = False) -> Plan:
    """Compile one rank's plan for a transport that sends messages.

    Args:
        schedule: What to compile.
        rank: Whose plan.
        apart: IN and OUT share no memory on this rank, so OUT may be overwritten early. It changes
            nothing that other ranks see.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    return _lower(schedule, _concerning(schedule, rank), rank, apart)[0]


def message_plans(schedule: Schedule, *, apart: bool = False) -> list[Plan]:
    """Compile the plans of all ranks; see `message_plan`."""
    return _lower(schedule, build_table(schedule), None, apart)


def _concerning(schedule: Schedule, rank: int) -> FoldTable:
    """List the folds that a rank executes, reads for or stores for."""
    table = near_table(schedule, rank, whole=True)
    concerns = table.owner == rank
    concerns[table.unit[table.rank == rank]] = True
    return table.units(concerns)


def _lower(schedule: Schedule, table: FoldTable, rank: int | None, apart: bool) -> list[Plan]:
    """Make the plan of one rank, or of all; what is no longer needed goes: it is the peak."""
    runs = _runs_of(table)
    del table
    runs = _place(schedule, runs, apart)
    moves = _moves(runs, rank)
    folds, slots = _folds(runs, rank), runs.slots
    del runs
    ranks = range(schedule.n) if rank is None else [rank]
    return _emit(schedule, (moves, folds, _waits(moves)), slots, ranks)


class _Part(NamedTuple):
    """Instructions of one kind: what orders them, and their operands."""

    code: np.ndarray  # ``[instructions]`` records of dtype `INSTR`
    # rank, phase, key: ``[instructions]`` whose it is, and its place within the round
    rank: np.ndarray
    phase: np.ndarray
    key: np.ndarray
    instr: np.ndarray  # ``[operands]`` instruction of each operand
    operands: np.ndarray  # ``[operands]`` records of dtype `OPERAND`


def _part(
    rank: np.ndarray,
    phase: np.ndarray | int,
    key: np.ndarray | int,
    instr: np.ndarray,
    places: Sequence[np.ndarray],
    **fields: np.ndarray | int,
) -> _Part:
    """Make instructions of columns; ``places`` are buffers and chunks of the operands."""
    code, operands = np.zeros(len(rank), INSTR), np.zeros(len(instr), OPERAND)
    for name, column in fields.items():
        code[name] = column
    operands["rank"] = rank[instr]
    operands["buffer"], operands["chunk"] = places
    phase, key = (np.broadcast_to(column, rank.shape) for column in (phase, key))
    return _Part(code, rank, phase, key, instr, operands)


def _moves(runs: Runs, rank: int | None) -> _Part:
    """List every message twice, as SEND and as RECV; of one rank, or of all."""
    at = np.flatnonzero(runs.remote)
    run, source = runs.run[at], runs.source[at]
    owner, other = runs.owner[run], runs.rank[at]
    start = runs.first_of(runs.source)[run]
    kept = (runs.nsrc[run] == 1) & ~runs.remote[start]
    phase = np.where(source | kept, _FIRST, _SECOND)
    order = np.lexsort((at, owner, runs.line[run]))
    key = np.empty(len(at), np.int64)  # alike in the plans of both ends
    key[order] = np.arange(len(at))
    receiver, sender = np.where(source, owner, other), np.where(source, other, owner)
    ends = np.concatenate([sender, receiver])
    end = np.arange(len(ends)) if rank is None else np.flatnonzero(ends == rank)
    move, receives = end % max(1, len(at)), end >= len(at)
    there, operand = source[move] != receives, at[move]
    return _part(
        ends[end],
        phase[move],
        key[move],
        np.arange(len(end)),
        [
            np.where(there, runs.buffer[operand], runs.own_buffer[operand]),
            np.where(there, runs.chunk[operand], runs.own_chunk[operand]),
        ],
        op=np.where(receives, Opcode.RECV.value, Opcode.SEND.value),
        peer=np.where(receives, sender[move], receiver[move]),
        round=runs.round[run[move]],
        count=runs.count[run[move]],
    )


def _folds(runs: Runs, rank: int | None) -> _Part:
    """List the folds that remain: all reductions, and copies that a message does not make."""
    remote, size = runs.remote, len(runs.owner)
    own = ~runs.source & ~remote
    copy = runs.nsrc == 1
    start, home = runs.first_of(runs.source), runs.first_of(own)
    fetched = copy & remote[start] if size else copy
    stored = own.copy()
    stored[home[fetched & (home >= 0)]] = False  # the message itself stores there
    result = runs.first_of(~runs.source & remote)
    result = result[~copy & (home < 0) & (result >= 0)]
    stored[result] = True
    kept = np.zeros(size, bool)
    kept[runs.run[stored]] = True
    kept &= True if rank is None else runs.owner == rank
    at = np.flatnonzero((runs.source | stored) & kept[runs.run])
    folds = np.flatnonzero(kept)
    return _part(
        runs.owner[folds],
        _FOLDS,
        folds,
        (np.cumsum(kept) - 1)[runs.run[at]],
        (runs.own_buffer[at], runs.own_chunk[at]),
        op=Opcode.FOLD.value,
        round=runs.round[folds],
        count=runs.count[folds],
        flags=runs.flags[folds],
        nsrc=runs.nsrc[folds],
        ndst=np.bincount(runs.run[stored], minlength=size)[folds],
    )


def _waits(moves: _Part) -> _Part:
    """One WAIT behind the messages of each rank, round and phase."""
    where = np.stack([moves.rank, moves.code["round"], moves.phase], axis=1)
    rank, round_, phase = unique_rows(where).T
    none = np.zeros(0, np.int64)
    fields = {"op": Opcode.WAIT.value, "peer": ALL, "round": round_}
    return _part(rank, phase + 1, 0, none, (none, none), **fields)


def _emit(
    schedule: Schedule, parts: Sequence[_Part], slots: np.ndarray, ranks: Sequence[int]
) -> list[Plan]:
    """Lay the instructions of each rank out in order."""
    # Records by their bytes, as joining arrays of them takes NumPy ten times as long.
    code = np.frombuffer(b"".join(part.code.tobytes() for part in parts), INSTR)
    operands = np.frombuffer(b"".join(part.operands.tobytes() for part in parts), OPERAND)
    rank, phase, key = map(np.concatenate, zip(*(part[1:4] for part in parts), strict=True))
    offsets = np.cumsum([0, *(len(part.code) for part in parts[:-1])])
    instr = np.concatenate([part.instr + k for part, k in zip(parts, offsets, strict=True)])
    order = np.lexsort((code["op"], key, phase, code["round"], rank))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    operands = operands[np.argsort(place[instr], kind="stable")]
    code, rank = code[order], rank[order]
    arity = np.bincount(place[instr], minlength=len(code))
    first = np.append(np.cumsum(arity) - arity, len(operands))
    plans = []
    for r in ranks:
        low, high = np.searchsorted(rank, [r, r + 1])
        own = code[low:high].copy()
        own["arg"] = np.where(own["op"] == Opcode.WAIT.value, 0, first[low:high] - first[low])
        pieces = operands[first[low] : first[high]]
        plans.append(Plan(schedule, r, own, pieces, int(slots[r]), False, messages=True))
    return plans


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


def _runs_of(table: FoldTable) -> Runs:
    """Merge the folds of a table into runs, their operands where the schedule has them."""
    complete = complete_folds(table)
    order, starts, lengths = merge_runs(table, complete)
    head = order[starts]
    arity = (table.nsrc + table.ndst)[head]
    run, place = spans(arity)
    operand = table.first[head][run] + place
    line = table.line[head]
    scratch = table.buffer == Buffer.TMP.value
    buffer = np.where(scratch, PlanBuffer.STAGING.value, table.buffer)[operand]
    chunk = table.chunk[operand]
    return Runs(
        owner=table.owner[head],
        line=line,
        round=table.line_round[line] if len(line) else line,
        count=lengths,
        flags=table.tree[head] * FOLD_TREE + complete[head] * FOLD_COMPLETE,
        nsrc=np.where(table.combines[head], np.maximum(2, table.nsrc[head]), 1),
        run=run,
        source=place < table.nsrc[head][run],
        rank=table.rank[operand],
        buffer=buffer,
        chunk=chunk,
        own_buffer=buffer,
        own_chunk=chunk,
        slots=np.zeros(table.n, np.int64),
    )


def _place(schedule: Schedule, runs: Runs, apart: bool) -> Runs:
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
    buffer = np.where(needs, PlanBuffer.STAGING.value, runs.buffer)
    chunk = np.where(needs, slot, runs.chunk)
    held = np.where(kept, start, np.where(home >= 0, home, np.where(copy, start, result)))
    target = np.where(remote & ~needs, held[runs.run], np.arange(len(runs.run)))
    return replace(runs, own_buffer=buffer[target], own_chunk=chunk[target], slots=slots)


def _received_at_home(runs: Runs, home: np.ndarray, apart: bool) -> np.ndarray:
    """Return the remote sources of reductions that can come to where the result will be.

    One of each reduction, whose own sources are elsewhere: what others read or write there in the
    same round would be a conflict, so no access needs what was there.
    """
    first = runs.first_of(runs.source & runs.remote)
    at = home[runs.run]
    same = (runs.buffer == runs.buffer[at]) & (runs.chunk == runs.chunk[at])
    taken = runs.first_of(runs.source & ~runs.remote & same) >= 0
    free = apart | (runs.buffer[home] == PlanBuffer.STAGING.value)
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

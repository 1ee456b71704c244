"""From a schedule to plans of matched messages, for transports without shared memory.

Every round has two phases. In the first the owners of folds receive their remote sources; in the
second they send what they have stored for others. All messages of a phase are posted together and
completed by one WAIT, the folds stand between the phases, so a plan needs no buffering anywhere::

    SEND, RECV, ...  WAIT  FOLD, ...  SEND, RECV, ...  WAIT

A copy of an own piece to others needs no second phase, a copy of a remote piece no slot. Messages
between two ranks are posted in the same order on both, so they need no tags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pycoll.schedule.compile import complete_folds, merge_runs
from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.plan import (
    ALL,
    FOLD_COMPLETE,
    FOLD_TREE,
    INSTR,
    OPERAND,
    Opcode,
    Plan,
    PlanBuffer,
)
from pycoll.schedule.table import FoldTable, build_table, partners, spans

_FIRST, _FOLDS, _SECOND = (
    0,
    2,
    3,
)  # the WAIT of a phase stands behind it, at _FIRST + 1, _SECOND + 1


def message_plan(schedule: Schedule, rank: int) -> Plan:
    """Compile one rank's plan for a transport that sends messages.

    Raises:
        ScheduleError: If a scratch slot, a chunk count or a root is out of range.
    """
    table = build_table(schedule, partners(schedule, rank), focus=rank)
    return _lower(schedule, table, [rank])[0]


def message_plans(schedule: Schedule) -> list[Plan]:
    """Compile the plans of all ranks; see `message_plan`."""
    table = build_table(schedule, schedule.all_ranks())
    return _lower(schedule, table, list(range(schedule.n)))


@dataclass(frozen=True)
class _Runs:
    """Folds over consecutive chunks, and where their operands lie for their owner.

    Attributes:
        owner, line, round, count, flags, nsrc: ``[runs]``.
        run, source: ``[operands]`` run of each operand, and whether it is a source.
        rank, buffer, chunk: ``[operands]`` the piece that the schedule names.
        own_buffer, own_chunk: ``[operands]`` where the owner has it: the piece itself, or a slot.
        slots: ``[n]`` slots that each rank needs.
    """

    owner: np.ndarray
    line: np.ndarray
    round: np.ndarray
    count: np.ndarray
    flags: np.ndarray
    nsrc: np.ndarray
    run: np.ndarray
    source: np.ndarray
    rank: np.ndarray
    buffer: np.ndarray
    chunk: np.ndarray
    own_buffer: np.ndarray
    own_chunk: np.ndarray
    slots: np.ndarray

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


def _lower(schedule: Schedule, table: FoldTable, ranks: list[int]) -> list[Plan]:
    runs = _place(schedule, _runs_of(table))
    moves, move_operands = _moves(runs)
    folds, fold_operands = _folds(runs)
    waits = _waits(moves)
    return _emit(schedule, (moves, folds, waits), (move_operands, fold_operands), runs, ranks)


def _runs_of(table: FoldTable) -> _Runs:
    complete = complete_folds(table)
    order, starts, lengths = merge_runs(table, complete)
    head = order[starts]
    arity = (table.nsrc + table.ndst)[head]
    run, place = spans(arity)
    operand = table.first[head][run] + place
    line = table.line[head]
    buffer = np.where(table.buffer == Buffer.TMP, PlanBuffer.CELL, table.buffer)[operand]
    chunk = table.chunk[operand]
    return _Runs(
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


def _place(schedule: Schedule, runs: _Runs) -> _Runs:
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
    slot, slots = _allocate(schedule, runs, needs)
    buffer = np.where(needs, PlanBuffer.CELL, runs.buffer)
    chunk = np.where(needs, slot, runs.chunk)
    held = np.where(kept, start, np.where(home >= 0, home, np.where(copy, start, result)))
    target = np.where(remote & ~needs, held[runs.run], np.arange(len(runs.run)))
    return replace(runs, own_buffer=buffer[target], own_chunk=chunk[target], slots=slots)


def _allocate(schedule: Schedule, runs: _Runs, needs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _moves(runs: _Runs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """List every message twice, as SEND and as RECV."""
    at = np.flatnonzero(runs.remote)
    run, source = runs.run[at], runs.source[at]
    owner, other = runs.owner[run], runs.rank[at]
    start = runs.first_of(runs.source)[run]
    kept = (runs.nsrc[run] == 1) & ~runs.remote[start]
    phase = np.where(source | kept, _FIRST, _SECOND)
    sender, receiver = np.where(source, other, owner), np.where(source, owner, other)
    there = runs.buffer[at], runs.chunk[at]
    here = runs.own_buffer[at], runs.own_chunk[at]
    sent = [np.where(source, a, b) for a, b in zip(there, here, strict=True)]
    received = [np.where(source, b, a) for a, b in zip(there, here, strict=True)]
    both = np.concatenate
    size = len(at)
    instructions = {
        "op": np.repeat([int(Opcode.SEND), int(Opcode.RECV)], size),
        "rank": both([sender, receiver]),
        "peer": both([receiver, sender]),
        "round": both([runs.round[run]] * 2),
        "phase": both([phase] * 2),
        "key": both([_key(runs, run, at)] * 2),
        "count": both([runs.count[run]] * 2),
    }
    operands = {
        "instr": np.arange(2 * size),
        "rank": instructions["rank"],
        "buffer": both([sent[0], received[0]]),
        "chunk": both([sent[1], received[1]]),
    }
    return instructions, operands


def _key(runs: _Runs, run: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Place of a message among those of its round, alike in the plans of both its ends."""
    order = np.lexsort((at, runs.owner[run], runs.line[run]))
    key = np.empty(len(at), np.int64)
    key[order] = np.arange(len(at))
    return key


def _folds(runs: _Runs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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
    index = np.cumsum(kept) - 1
    at = np.flatnonzero((runs.source | stored) & kept[runs.run])
    folds = np.flatnonzero(kept)
    instructions = {
        "op": np.full(len(folds), int(Opcode.FOLD)),
        "rank": runs.owner[folds],
        "peer": np.zeros(len(folds), np.int64),
        "round": runs.round[folds],
        "phase": np.full(len(folds), _FOLDS),
        "key": folds,
        "count": runs.count[folds],
        "flags": runs.flags[folds],
        "nsrc": runs.nsrc[folds],
        "ndst": np.bincount(runs.run[stored], minlength=size)[folds],
    }
    operands = {
        "instr": index[runs.run[at]],
        "rank": runs.owner[runs.run[at]],
        "buffer": runs.own_buffer[at],
        "chunk": runs.own_chunk[at],
    }
    return instructions, operands


def _waits(moves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One WAIT behind the messages of each rank, round and phase."""
    where = np.stack([moves["rank"], moves["round"], moves["phase"]])
    rank, round_, phase = np.unique(where, axis=1)
    size = len(rank)
    fixed = {"op": int(Opcode.WAIT), "peer": ALL, "key": 0, "count": 0}
    columns = {name: np.full(size, value) for name, value in fixed.items()}
    return {**columns, "rank": rank, "round": round_, "phase": phase + 1}


def _emit(
    schedule: Schedule,
    parts: tuple[dict[str, np.ndarray], ...],
    operand_parts: tuple[dict[str, np.ndarray], ...],
    runs: _Runs,
    ranks: list[int],
) -> list[Plan]:
    """Lay the instructions of each rank out in order."""
    sizes = [len(part["op"]) for part in parts]
    code = np.zeros(sum(sizes), INSTR)
    rank, phase, key = (
        np.concatenate([part[name] for part in parts]) for name in ("rank", "phase", "key")
    )
    offset = 0
    for part, size in zip(parts, sizes, strict=True):
        for name in INSTR.names:
            if name in part:
                code[name][offset : offset + size] = part[name]
        offset += size
    instr = np.concatenate([operand_parts[0]["instr"], operand_parts[1]["instr"] + sizes[0]])
    operands = np.zeros(len(instr), OPERAND)
    for name in OPERAND.names:
        operands[name] = np.concatenate([part[name] for part in operand_parts])
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
        own["arg"] = np.where(own["op"] == Opcode.WAIT, 0, first[low:high] - first[low])
        pieces = operands[first[low] : first[high]]
        plans.append(Plan(schedule, r, own, pieces, int(runs.slots[r]), False, messages=True))
    return plans

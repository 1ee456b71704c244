"""From a schedule to plans for peer memory: deriving every SIGNAL and WAIT.

For each cell of memory (rank, buffer, chunk) the accesses are sorted by line. An access depends on
the last write before it; a write also depends on every read since that write. Dependences between
folds of different ranks become waits; see docs/architecture.md, section 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.lowering.near import near_table
from pycoll.schedule.lowering.plan import (
    DONE,
    FOLD_COMPLETE,
    FOLD_TREE,
    INSTR,
    OPERAND,
    Opcode,
    Plan,
    PlanBuffer,
    step_of,
)
from pycoll.schedule.lowering.stage import stage
from pycoll.schedule.lowering.table import FoldTable, build_table, distinct, unique_rows

MAX_STEPS = 0xFFFB
"""Lines that a rank's step can count, in the 16 bits that shared memory has for it."""

_IN, _OUT, _STAGING = (place.value for place in PlanBuffer)  # for NumPy


def peer_plan(schedule: Schedule, rank: int, *, direct: bool, in_place: bool = False) -> Plan:
    """Compile one rank's plan for memory that all ranks map.

    Args:
        schedule: What to compile.
        rank: Whose plan.
        direct: Peers access the users' arrays themselves; otherwise through staging buffers.
        in_place: IN and OUT are the same memory. It changes direct plans only.

    Raises:
        ScheduleError: If folds of one round conflict, if the schedule does not work in place, or if
            it has more lines than a step can count.
    """
    return _lower(schedule, near_table(schedule, rank), [rank], direct, in_place)[0]


def staged_slots(schedule: Schedule) -> int | None:
    """Return the slots of a rank's staging buffer, which are as many on every rank.

    Returns:
        Slots; None if it has more lines than a step can count.
    """
    table = near_table(schedule, 0)
    return None if table.lines > MAX_STEPS else int(stage(table, schedule)[1])


def peer_plans(schedule: Schedule, *, direct: bool, in_place: bool = False) -> list[Plan]:
    """Compile the plans of all ranks; see `peer_plan`."""
    return _lower(schedule, build_table(schedule), range(schedule.n), direct, in_place)


def _lower(
    schedule: Schedule, table: FoldTable, ranks: Sequence[int], direct: bool, in_place: bool
) -> list[Plan]:
    if direct and in_place and not schedule.algorithm.in_place:
        raise ScheduleError(f"{schedule} does not work in place on memory that peers read directly")
    if table.lines > MAX_STEPS:
        raise ScheduleError(
            f"{schedule} has {table.lines} folds; a rank's step in shared memory counts {MAX_STEPS}"
        )
    complete = complete_folds(table)
    if direct:
        buffer = np.where(table.buffer == Buffer.TMP.value, _STAGING, table.buffer)
        table, slots = replace(table, buffer=buffer), schedule.slots
    else:
        before = len(table.owner)
        table, slots = stage(table, schedule)
        copies_in = int(np.sum(table.line < 0))
        complete = np.pad(complete, (copies_in, len(table.owner) - before - copies_in))
    mode = f"{'direct' if direct else 'staged'}{', in place' if direct and in_place else ''}"
    waits, signals = derive(table, direct, in_place, f"{schedule}, {mode}")
    if len(ranks) < schedule.n:
        own = table.owner == ranks[0]  # all of them, or one
        table, complete = table.units(own), complete[own]
    return _emit(schedule, table, complete, waits, signals, ranks, slots, direct)


def complete_folds(table: FoldTable) -> np.ndarray:
    """Mark the unit folds that combine the inputs of all ranks at once."""
    unit = table.unit
    source = ~table.is_write & (table.buffer == Buffer.IN.value)
    seen = distinct(unit[source] * table.n + table.rank[source]) // table.n
    return (np.bincount(seen, minlength=len(table.owner)) == table.n) & (table.nsrc == table.n)


def derive(
    table: FoldTable, direct: bool, in_place: bool, title: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Derive the synchronisation; `title` is for messages.

    Returns:
        Waits as ``[waits, 4]`` (consumer rank, consumer line, producer rank, producer line), and
        signals as ``[signals, 2]`` (producer rank, producer line), both sorted and unique.

    Raises:
        ScheduleError: If two folds of one round conflict.
    """
    in_place = in_place and direct
    waits = _dependences(table, direct, in_place, title)
    if in_place and np.any(_stored_onto_itself(table)):
        # Ranks whose arrays are apart execute these copies; the plan has to suit both.
        waits = np.concatenate([waits, _dependences(table, direct, False, title)])
    if direct:
        waits = np.concatenate([waits, _contacts(table)])
    waits = _prune(waits, table.n)
    return waits, unique_rows(waits[:, 2:])


def _stored_onto_itself(table: FoldTable) -> np.ndarray:
    """Mark the operands that a copy writes where it read them, if IN and OUT are one memory.

    The engines skip such a copy, so nobody has to wait for it; see docs/verification.md.
    """
    unit = table.unit
    source = table.first[unit]
    same = (table.rank == table.rank[source]) & (table.chunk == table.chunk[source])
    same &= (table.buffer != _STAGING) & (table.buffer[source] != _STAGING)
    return same & table.is_write & (~table.combines[unit])


def _dependences(table: FoldTable, direct: bool, aliased: bool, title: str) -> np.ndarray:
    """List the waits that a chunk's accesses make necessary, as `derive` returns them."""
    cell, line, owner, unit, write = _accesses(table, direct, aliased)
    order = np.argsort((cell * (table.lines + 2) + line + 1) * 2 + write, kind="stable")
    cell, line, owner, unit, write = (a[order] for a in (cell, line, owner, unit, write))
    producer, consumer = _dependent(cell, write)
    _check_conflicts(title, table, cell, line, owner, unit, producer, consumer)
    away = owner[producer] != owner[consumer]
    producer, consumer = producer[away], consumer[away]
    return np.stack([owner[consumer], line[consumer], owner[producer], line[producer]], axis=1)


def _dependent(cell: np.ndarray, write: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair the accesses, sorted by cell and line, of which one has to wait for the other."""
    index = np.arange(len(cell))
    starts = np.maximum.accumulate(np.where(np.diff(cell, prepend=-1) != 0, index, 0))
    last = np.maximum.accumulate(np.where(write, index, -1))
    last = np.concatenate([[-1], last[:-1]]) if len(last) else last
    after_write = last >= starts
    following = np.where(write, index, len(cell))[::-1]
    following = np.minimum.accumulate(following)[::-1] if len(cell) else following
    within = (following < len(cell)) & ~write
    within[within] &= cell[following[within]] == cell[within]
    producer = np.concatenate([last[after_write], index[within]])
    return producer, np.concatenate([index[after_write], following[within]])


def _accesses(table: FoldTable, direct: bool, aliased: bool) -> tuple[np.ndarray, ...]:
    """List every access to shared memory, with those of entry and exit for direct plans."""
    buffer = np.where(aliased & (table.buffer == _IN), _OUT, table.buffer)
    span = int(table.chunk.max(initial=0)) + 1
    cell = (table.rank * 3 + buffer) * span + table.chunk
    unit = table.unit
    made = ~_stored_onto_itself(table) if aliased else np.ones(len(cell), bool)
    columns = [a[made] for a in (cell, table.line[unit], table.owner[unit], unit, table.is_write)]
    if direct:
        remote = (table.rank != table.owner[unit]) & (buffer != _STAGING)
        user = distinct(cell[remote])
        holder = user // (3 * span)
        for line in (-1, table.lines):
            edge = [user, np.full(len(user), line), holder, np.full(len(user), -1)]
            edge.append(np.ones(len(user), bool))
            columns = [np.concatenate(pair) for pair in zip(columns, edge, strict=True)]
    return tuple(columns)


def _contacts(table: FoldTable) -> np.ndarray:
    """Return a wait for the entry of every rank whose arrays a fold touches.

    A rank's progress may be known through others; the addresses of its arrays come from itself.
    """
    user = table.owner[table.unit]
    away = (table.rank != user) & (table.buffer != _STAGING)
    columns = [user[away], table.line[table.unit][away], table.rank[away]]
    return unique_rows(np.stack([*columns, np.full(int(away.sum()), -1)], axis=1))


def _check_conflicts(
    title: str,
    table: FoldTable,
    cell: np.ndarray,
    line: np.ndarray,
    owner: np.ndarray,
    unit: np.ndarray,
    producer: np.ndarray,
    consumer: np.ndarray,
) -> None:
    rounds = np.concatenate([[-1], table.line_round, [np.iinfo(np.int64).max]])
    same = rounds[line[producer] + 1] == rounds[line[consumer] + 1]
    same &= (unit[producer] != unit[consumer]) | (producer == consumer)
    if np.any(same):
        i = int(np.flatnonzero(same)[0])
        a, b = producer[i], consumer[i]
        piece, chunk = divmod(int(cell[a]), int(table.chunk.max()) + 1)
        where = f"chunk {chunk} of {PlanBuffer(piece % 3).name} on rank {piece // 3}"
        pair = f"rank {owner[a]} (line {line[a]}) and rank {owner[b]} (line {line[b]})"
        if unit[a] == unit[b]:
            pair = f"twice rank {owner[a]} (line {line[a]})"
        when = f"{title}: in round {rounds[line[a] + 1]}"
        raise ScheduleError(f"{when} {pair} touch {where}, and one of them writes it")


def _prune(waits: np.ndarray, n: int) -> np.ndarray:
    """Drop a wait when the same rank has already waited for the same peer to get that far."""
    if not len(waits):
        return waits
    consumer, at_line, producer, line = waits.T
    pair = consumer * n + producer
    order = np.lexsort((-line, at_line, pair))
    height = int(line.max()) + 2
    reached = (pair * height + line + 1)[order]
    before = np.concatenate([[-1], np.maximum.accumulate(reached)[:-1]])
    kept = waits[order[reached > np.maximum(before, (pair[order] * height) - 1)]]
    return kept[np.lexsort((kept[:, 2], kept[:, 1], kept[:, 0]))]


def merge_runs(table: FoldTable, complete: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge unit folds over consecutive chunks of one fold; a run's length is in chunks.

    Returns:
        The order of the units, and for each run its first unit (in that order) and its length.
    """
    order = np.lexsort((np.arange(len(table.owner)), table.line, table.owner))
    arity, first, unit = table.nsrc + table.ndst, table.first, table.unit
    joined = np.zeros(len(order), bool)
    if len(order) > 1:
        a, b = order[:-1], order[1:]
        keys = (table.owner, table.line, table.nsrc, table.ndst, complete)
        joined[1:] = (b == a + 1) & np.all([k[a] == k[b] for k in keys], axis=0)
        back = np.arange(len(unit)) - arity[unit]
        step = (table.rank == table.rank[back]) & (table.buffer == table.buffer[back])
        step &= table.chunk == table.chunk[back] + table.width[unit - 1]
        whole = np.logical_and.reduceat(step, first) if len(first) else step
        joined[1:] &= whole[b]
    starts = np.flatnonzero(~joined)
    lengths = np.add.reduceat(table.width[order], starts) if len(starts) else starts
    return order, starts, lengths


def _emit(
    schedule: Schedule,
    table: FoldTable,
    complete: np.ndarray,
    waits: np.ndarray,
    signals: np.ndarray,
    ranks: Sequence[int],
    slots: int,
    direct: bool,
) -> list[Plan]:
    """Lay the instructions of each rank out in order: waits, fold, signal; line by line."""
    order, starts, lengths = merge_runs(table, complete)
    head = order[starts]
    lines, first = table.lines, table.first
    rounds = np.concatenate([[0], table.line_round, [max(0, int(table.line_round.max(initial=0)))]])
    entered = np.stack([np.arange(schedule.n), np.full(schedule.n, -1)], axis=1)
    signals = unique_rows(np.concatenate([signals, entered]))
    parts = []
    for op, rank, line in (
        (Opcode.WAIT.value, waits[:, 0], waits[:, 1]),
        (Opcode.FOLD.value, table.owner[head], table.line[head]),
        (Opcode.SIGNAL.value, signals[:, 0], signals[:, 1]),
    ):
        part = np.zeros(len(rank), INSTR)
        part["op"], part["round"] = op, rounds[line + 1]
        parts.append((part, rank, line, np.full(len(rank), len(parts))))
    wait, fold, signal = (part for part, *_ in parts)
    wait["peer"], wait["arg"] = waits[:, 2], step_of(waits[:, 3])
    signal["arg"] = step_of(signals[:, 1])
    fold["nsrc"], fold["ndst"] = table.nsrc[head], table.ndst[head]
    fold["arg"], fold["count"] = first[head], lengths
    fold["flags"] = table.tree[head] * FOLD_TREE + complete[head] * FOLD_COMPLETE
    code, owner, line, phase = (np.concatenate(column) for column in zip(*parts, strict=True))
    sequence = np.lexsort((phase, line, owner))
    code, owner, line = code[sequence], owner[sequence], line[sequence]
    operands = np.zeros(len(table.rank), OPERAND)
    operands["rank"], operands["buffer"], operands["chunk"] = table.rank, table.buffer, table.chunk
    plans = []
    for rank in ranks:
        mine = slice(*np.searchsorted(owner, [rank, rank + 1]))
        own = _finish(code[mine], line[mine], lines) if direct else code[mine]
        plans.append(Plan(schedule, rank, *_pack(own, operands), slots, direct))
    return plans


def _finish(code: np.ndarray, line: np.ndarray, lines: int) -> np.ndarray:
    """Publish DONE after the last access to peers' arrays, instead of the last line's signal."""
    last = int(np.searchsorted(line, lines))
    done = np.zeros(1, INSTR)
    done["op"], done["arg"], done["round"] = Opcode.SIGNAL.value, DONE, code["round"][last - 1]
    previous = code[last - 1]
    replaced = previous["op"] == Opcode.SIGNAL.value and previous["arg"] > step_of(-1)
    return np.concatenate([code[: last - 1] if replaced else code[:last], done, code[last:]])


def _pack(code: np.ndarray, operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep only the operands that this code uses, in order."""
    code = code.copy()
    folds = np.flatnonzero(code["op"] == Opcode.FOLD.value)
    arity = code["nsrc"][folds].astype(np.int64) + code["ndst"][folds]
    offset = np.cumsum(arity) - arity
    index = np.repeat(code["arg"][folds].astype(np.int64) - offset, arity) + np.arange(arity.sum())
    code["arg"][folds] = offset
    return code, operands[index]

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

import numpy as np

from pycoll.schedule.ir import Schedule
from pycoll.schedule.lowering.places import Runs, place, runs_of
from pycoll.schedule.lowering.plan import ALL, INSTR, OPERAND, Opcode, Plan
from pycoll.schedule.lowering.table import FoldTable, build_table, partners, unique_rows

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
    table = build_table(schedule, partners(schedule, rank), focus=rank)
    return _lower(schedule, table, [rank], apart)[0]


def message_plans(schedule: Schedule, *, apart: bool = False) -> list[Plan]:
    """Compile the plans of all ranks; see `message_plan`."""
    table = build_table(schedule, schedule.all_ranks())
    return _lower(schedule, table, list(range(schedule.n)), apart)


def _lower(schedule: Schedule, table: FoldTable, ranks: list[int], apart: bool) -> list[Plan]:
    runs = place(schedule, runs_of(table), apart)
    moves, move_operands = _moves(runs)
    folds, fold_operands = _folds(runs)
    waits = _waits(moves)
    return _emit(schedule, (moves, folds, waits), (move_operands, fold_operands), runs, ranks)


def _moves(runs: Runs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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


def _key(runs: Runs, run: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Place of a message among those of its round, alike in the plans of both its ends."""
    order = np.lexsort((at, runs.owner[run], runs.line[run]))
    key = np.empty(len(at), np.int64)
    key[order] = np.arange(len(at))
    return key


def _folds(runs: Runs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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
    where = np.stack([moves["rank"], moves["round"], moves["phase"]], axis=1)
    rank, round_, phase = unique_rows(where).T
    size = len(rank)
    fixed = {"op": int(Opcode.WAIT), "peer": ALL, "key": 0, "count": 0}
    columns = {name: np.full(size, value) for name, value in fixed.items()}
    return {**columns, "rank": rank, "round": round_, "phase": phase + 1}


def _emit(
    schedule: Schedule,
    parts: tuple[dict[str, np.ndarray], ...],
    operand_parts: tuple[dict[str, np.ndarray], ...],
    runs: Runs,
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
        own["arg"] = np.where(own["op"] == Opcode.WAIT.value, 0, first[low:high] - first[low])
        pieces = operands[first[low] : first[high]]
        plans.append(Plan(schedule, r, own, pieces, int(runs.slots[r]), False, messages=True))
    return plans

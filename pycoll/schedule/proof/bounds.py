"""Checks of plans that need no run: every operand lies where its rank may access memory."""

from __future__ import annotations

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import (
    ALL,
    DONE,
    ENTERED,
    FAILED,
    INSTR,
    OPERAND,
    Opcode,
    Plan,
    PlanBuffer,
)
from pycoll.schedule.lowering.table import spans


class Joined:
    """The plans of all ranks behind one another.

    Attributes:
        title: Schedule and mode, for messages.
        plans: The plans, in rank order.
        code: ``[instructions]`` all code; ``arg`` of folds and messages counts from the start of
            ``operands``.
        rank: ``[instructions]`` whose code it is.
        operands: All operands.
    """

    def __init__(self, plans: list[Plan], title: str) -> None:
        """Join plans and check that they belong together."""
        self.title = title
        self.plans = plans
        sizes = np.array([len(plan.operands) for plan in plans])
        self.rank: np.ndarray = np.repeat(np.arange(len(plans)), [len(plan.code) for plan in plans])
        # Bytes, because joining hundreds of arrays of records takes NumPy ten times as long.
        code = bytearray().join(plan.code.tobytes() for plan in plans)
        self.code: np.ndarray = np.frombuffer(code, INSTR)
        operands = b"".join(plan.operands.tobytes() for plan in plans)
        self.operands: np.ndarray = np.frombuffer(operands, OPERAND)
        schedule = plans[0].schedule
        # Peer plans count the slots of every rank, message plans those of the rank itself.
        same = {(plan.direct, plan.messages, plan.slots * (not plan.messages)) for plan in plans}
        if [plan.rank for plan in plans] != list(range(schedule.n)) or len(same) > 1:
            raise ScheduleError(
                f"{title}: wanted one plan of each of {schedule.n} ranks, of one kind"
            )
        known = np.isin(self.code["op"], [*Opcode])
        if not np.all(known):
            self.fail(int(np.flatnonzero(~known)[0]), "is an unknown instruction")
        named = (self.code["op"] != Opcode.SIGNAL.value) & (self.code["op"] != Opcode.WAIT.value)
        end = self.code["arg"].astype(np.int64) + self.arity
        self.reject(named & (end > sizes[self.rank]), "names operands that do not exist")
        self.code["arg"] += np.where(named, (np.cumsum(sizes) - sizes)[self.rank], 0).astype("u4")

    @property
    def arity(self) -> np.ndarray:
        """``[instructions]`` number of operands."""
        op = self.code["op"]
        fold = self.code["nsrc"].astype(np.int64) + self.code["ndst"]
        move = (op == Opcode.SEND.value) | (op == Opcode.RECV.value)
        return np.where(op == Opcode.FOLD.value, fold, np.where(move, 1, 0))

    def fail(self, i: int, text: str) -> None:
        """Raise an error about an instruction."""
        at = f"rank {self.rank[i]}, round {self.code['round'][i]}"
        raise ScheduleError(f"{self.title}: {at}: {text}")

    def reject(self, bad: np.ndarray, text: str) -> None:
        """Raise an error about the first instruction that is marked."""
        if np.any(bad):
            i = int(np.flatnonzero(bad)[0])
            self.fail(i, f"{Opcode(self.code['op'][i]).name.lower()} {text}")


def check_bounds(joined: Joined, promise: Promise) -> None:
    """Check every instruction and operand against the world, the layouts and the slots.

    Raises:
        ScheduleError: Naming rank, round and piece.
    """
    code, first, reject = joined.code, joined.plans[0], joined.reject
    fold, signal, wait = (
        code["op"] == op.value for op in (Opcode.FOLD, Opcode.SIGNAL, Opcode.WAIT)
    )
    move = ~(fold | signal | wait)
    reject(fold & ((code["nsrc"] == 0) | (code["ndst"] == 0)), "lacks sources or destinations")
    reject((joined.arity > 0) & (code["count"] == 0), "covers no chunk")
    if first.messages:
        reject(signal, "has no place among messages")
        reject(wait & (code["peer"] != ALL), "waits for one peer only")
        reject(move & (code["peer"] >= promise.n), "names a rank that does not exist")
        reject(move & (code["peer"] == joined.rank), "goes to its own rank")
    else:
        reject(move, "needs a message transport")
        reject(wait & (code["peer"] >= promise.n), "names a rank that does not exist")
        reject(wait & (code["peer"] == joined.rank), "waits for its own rank")
        reject(
            ~fold & ((code["arg"] < ENTERED) | (code["arg"] >= FAILED)), "has a step out of range"
        )
        if first.direct:
            _check_done(joined)
    _check_operands(joined, promise)


def _check_done(joined: Joined) -> None:
    """Check that each direct plan ends its work with DONE; only waits follow."""
    op, n = joined.code["op"], len(joined.plans)
    done = np.flatnonzero((op == Opcode.SIGNAL.value) & (joined.code["arg"] == DONE))
    missing = np.flatnonzero(np.bincount(joined.rank[done], minlength=n) == 0)
    if len(missing):
        raise ScheduleError(f"{joined.title}: rank {missing[0]} never publishes that it is done")
    last = np.zeros(n, np.int64)
    np.maximum.at(last, joined.rank[done], done)
    after = np.arange(len(op)) > last[joined.rank]
    joined.reject(after & (op != Opcode.WAIT.value), "comes after the rank said that it is done")


def _check_operands(joined: Joined, promise: Promise) -> None:
    code, plan = joined.code, joined.plans[0]
    slots = np.array([plan.slots for plan in joined.plans])
    instr, place = spans(joined.arity)
    piece = joined.operands[code["arg"].astype(np.int64)[instr] + place]
    rank, buffer = piece["rank"].astype(np.int64), piece["buffer"]
    low = piece["chunk"].astype(np.int64)
    high = low + code["count"][instr]
    writes = (code["op"][instr] == Opcode.FOLD.value) & (place >= code["nsrc"][instr])
    writes |= code["op"][instr] == Opcode.RECV.value
    slot = buffer == PlanBuffer.STAGING.value
    inside = np.where(slot, high <= slots[rank % promise.n], high <= promise.chunks) & (
        rank < promise.n
    )
    i, c, top = rank % promise.n, low % promise.chunks, (high - 1) % promise.chunks
    first, last = ((promise.in_held[i, at], promise.out_held[i, at]) for at in (c, top))
    held = np.where(buffer == PlanBuffer.IN.value, first[0] & last[0], first[1] & last[1])
    private = plan.messages | (~slot & (not plan.direct))
    for bad, text in (
        (buffer > PlanBuffer.STAGING.value, "which is no buffer"),
        (~inside, f"outside {slots.max()} slots, {promise.chunks} chunks or {promise.n} ranks"),
        (inside & ~slot & ~held, "which the rank does not hold"),
        (writes & (buffer == PlanBuffer.IN.value), "but inputs are never written"),
        (private & (rank != joined.rank[instr]), "which belongs to another rank"),
    ):
        if np.any(bad):
            k = int(np.flatnonzero(bad)[0])
            name = ("in", "out", "slot")[min(buffer[k], 2)]
            span = f"{low[k]}" if high[k] == low[k] + 1 else f"{low[k]}..{high[k] - 1}"
            joined.fail(int(instr[k]), f"touches {name}[{rank[k]}:{span}], {text}")


def check_contacts(joined: Joined) -> None:
    """Check that the graph of waits, or of messages, connects all ranks.

    Then a rank that makes another call than its neighbours is noticed, whichever rank it is.
    """
    code, n = joined.code, len(joined.plans)
    contact = joined.code["op"] == (
        Opcode.WAIT.value if not joined.plans[0].messages else Opcode.RECV.value
    )
    a, b = joined.rank[contact], code["peer"][contact].astype(np.int64)
    group = np.arange(n)
    while True:
        before = group.copy()
        low = np.minimum(group[a], group[b])
        np.minimum.at(group, a, low)
        np.minimum.at(group, b, low)
        group = group[group]
        if np.array_equal(before, group):
            break
    if np.any(group):
        lost = int(np.flatnonzero(group)[0])
        raise ScheduleError(
            f"{joined.title}: rank {lost} is in no contact with rank 0, not even through others, "
            f"so a mismatched call could pass unseen"
        )

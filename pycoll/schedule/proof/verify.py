"""Proving a schedule: its lowered plans are run symbolically, in every mode, before any byte moves.

See docs/verification.md for what is checked and why that is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Schedule
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.compile import peer_plans
from pycoll.schedule.lowering.messages import message_plans
from pycoll.schedule.lowering.plan import Opcode, Plan, PlanBuffer
from pycoll.schedule.lowering.table import spans
from pycoll.schedule.proof.bounds import Joined, check_bounds, check_contacts
from pycoll.schedule.proof.interpret_messages import Exchange, run_messages
from pycoll.schedule.proof.interpret_peer import check_races, check_run_ahead, run_peer, trace_of
from pycoll.schedule.proof.trace import Trace
from pycoll.schedule.proof.values import Expressions, Outcome, describe, judge

CONSECUTIVE = 8  # worlds up to this size are also run over three consecutive calls


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule whose plans are proven."""

    schedule: Schedule  # what was proven
    rounds: int  # number of rounds
    bytes_sent: float  # most bytes that leave a rank, as a fraction of the full vector
    order: str  # ``"tree"``, ``"rank"`` or ``"any"``; ``""`` if nothing is reduced
    roundings: int  # largest number of folds on the way from an input to an output
    slots: tuple[int, int, int]  # of a rank's staging buffer: direct, staged, message plan
    # folds, waits: numbers of instructions in the direct plans of all ranks
    folds: int
    waits: int
    seconds: float  # processor time the proof took


_ONE_MEMORY = "here IN and OUT are one memory: an algorithm that cannot work so says in_place=False"
_ONE_SLOT = (
    "staged, a chunk of IN and of OUT have one slot, so a copy between them is not for the round "
    "in which peers read IN: move it to another round, or say in_place=False"
)


@contextmanager
def _hinting(hint: str = _ONE_MEMORY) -> Iterator[None]:
    """Add to an error what may be done about it."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(f"{error}; {hint}") from error


def modes(schedule: Schedule) -> Iterator[tuple[str, bool, list[Plan]]]:
    """Yield each way of lowering: its name, whether IN and OUT may be one memory, its plans."""
    in_place, staged = schedule.algorithm.in_place, schedule.algorithm.in_place_staged
    yield "direct", False, peer_plans(schedule, direct=True)
    if in_place:
        with _hinting():
            plans = peer_plans(schedule, direct=True, in_place=True)
        yield "direct, in place", True, plans
    with _hinting(_ONE_SLOT) if in_place else nullcontext():
        plans = peer_plans(schedule, direct=False)  # right in place, so all that is left is slots
    yield "staged", staged, plans
    yield "messages", staged, message_plans(schedule)
    if COLLECTIVES[schedule.collective].reduces:
        yield "messages, apart", False, message_plans(schedule, apart=True)


def prove(schedule: Schedule) -> Proof:
    """Prove the plans of a schedule in every mode; see `proven`."""
    return proven(schedule)[0]


def proven(schedule: Schedule) -> tuple[Proof, dict[str, list[Plan]]]:
    """Prove the plans of a schedule in every mode; return these, too, by mode.

    Raises:
        ScheduleError: Naming schedule, mode, rank, round and piece.
    """
    started = time.process_time()
    plans, outcomes = {}, {}
    expressions = Expressions(Promise.of(schedule))
    for mode, aliased, made in modes(schedule):
        plans[mode] = made
        with _hinting() if aliased else nullcontext():
            outcomes[mode] = verify(made, mode=mode, in_place=aliased, known=expressions)
    outcome = outcomes["direct"]
    for mode, other in outcomes.items():
        if other != outcome:
            raise ScheduleError(f"{schedule}: {mode} plans give {other}, direct ones {outcome}")
    declared = schedule.algorithm.order
    if declared not in outcome.orders:
        raise ScheduleError(
            f"{schedule} declares the reduction order {declared!r}, but has {outcome.order!r}"
        )
    direct = Joined(plans["direct"], str(schedule))
    op = direct.code["op"]
    used = direct.code["round"][op == Opcode.FOLD]
    proof = Proof(
        schedule=schedule,
        rounds=int(used.max()) + 1 if len(used) else 0,
        bytes_sent=_bytes_sent(direct),
        order=declared if declared != "any" else outcome.order,
        roundings=outcome.roundings,
        slots=tuple(max(p.slots for p in plans[m]) for m in ("direct", "staged", "messages")),
        folds=int(np.sum(op == Opcode.FOLD)),
        waits=int(np.sum(op == Opcode.WAIT)),
        seconds=time.process_time() - started,
    )
    return proof, plans


def verify(
    plans: Sequence[Plan],
    *,
    mode: str = "",
    in_place: bool = False,
    known: Expressions | None = None,
) -> Outcome:
    """Judge the plans of all ranks, knowing nothing of how they were made.

    Args:
        plans: One plan of each rank, in rank order.
        mode: Name of the mode, for messages.
        in_place: IN and OUT may also be the same memory.
        known: Values that other plans of the same schedule have; more are added.

    Raises:
        ScheduleError: Naming schedule, mode, rank, round and piece.
    """
    schedule = plans[0].schedule
    expressions = known or Expressions(Promise.of(schedule))
    promise = expressions.promise
    title = f"{schedule}, {mode}" if mode else str(schedule)
    joined = Joined(list(plans), title)
    check_bounds(joined, promise)
    in_fold = promise.reduces and plans[0].scales_in_fold
    traces = _traces(joined, promise, in_place)
    outcomes, read = [], []
    for trace in traces:
        outcome, found = judge(trace, expressions, in_fold)
        outcomes.append(outcome)
        read.append(found)
        _check_sources(trace, expressions, read[0], found)
    check_contacts(joined)
    if outcomes[0] != outcomes[-1]:
        raise ScheduleError(f"{title}: {outcomes[0]} in place, {outcomes[-1]} otherwise")
    return outcomes[0]


def _traces(joined: Joined, promise: Promise, in_place: bool) -> Iterator[Trace]:
    """Run the plans; yield the accesses with IN and OUT being the same memory, and not."""
    ways = (True, False) if in_place else (False,)
    if joined.plans[0].messages:
        found = Exchange(joined)
        for aliased in ways:
            yield run_messages(joined, found, promise, aliased)
        return
    run = run_peer(joined)
    for aliased in ways:
        trace = trace_of(run, promise, aliased)
        check_races(run, trace)
        yield trace
    if promise.n <= CONSECUTIVE:
        run = run_peer(joined, calls=3)
        for aliased in ways:
            check_races(run, trace_of(run, promise, aliased))
        check_run_ahead(run)


def _check_sources(
    trace: Trace, expressions: Expressions, shared: np.ndarray, separate: np.ndarray
) -> None:
    """Check that every source has the same value whether or not IN and OUT are the same memory.

    Then it has that value on whichever ranks they are: some may work in place, others not.
    """
    bad = np.flatnonzero(shared != separate)
    if len(bad):
        units, i = trace.units, bad[0]
        piece = f"{PlanBuffer(units.buffer[i]).name.lower()}[{units.rank[i]}:{units.chunk[i]}]"
        raise ScheduleError(
            f"{trace.title}: {trace.who(units.event_of[i])}: reads {piece}, which holds "
            f"{describe(expressions, shared[i])} where IN and OUT are one memory, and "
            f"{describe(expressions, separate[i])} elsewhere, but ranks may differ in that"
        )


def _bytes_sent(joined: Joined) -> float:
    """Most bytes that leave a rank, by others' reads and its own writes, per byte of the vector."""
    fold = joined.code["op"] == Opcode.FOLD
    folds, owner = joined.code[fold], joined.rank[fold]
    of, place = spans(joined.arity[fold])
    rank = joined.operands["rank"][folds["arg"].astype(np.int64)[of] + place].astype(np.int64)
    away = rank != owner[of]
    sender = np.where(place < folds["nsrc"][of], rank, owner[of])[away]
    sent = np.bincount(sender, folds["count"][of][away], len(joined.plans))
    return float(sent.max()) / joined.plans[0].schedule.chunks

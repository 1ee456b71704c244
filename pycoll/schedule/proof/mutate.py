"""Mutation: does the verifier reject plans that are wrong in one place?

`mutants` makes them of schedules (one fold of one rank is lost, repeated, redirected or swapped,
and the plans are compiled anew) and of lowered plans (one instruction or operand is changed). A
mutant that the verifier accepts is either still right, for a reason that is given and after
`replay` has executed it in many orders, or it shows a hole in the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Schedule
from pycoll.schedule.lowering.plan import Opcode, Plan, PlanBuffer
from pycoll.schedule.proof.bounds import Joined
from pycoll.schedule.proof.interpret_peer import run_peer
from pycoll.schedule.proof.mutants import plan_mutants, schedule_mutants
from pycoll.schedule.proof.replay import replay
from pycoll.schedule.proof.verify import modes, prove, verify


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        operator: What kind of change it is.
        change: The change, in words.
        error: Why it was rejected; empty if it was accepted.
        reason: Why an accepted one is still right; empty if nothing explains it.
    """

    operator: str
    change: str
    error: str
    reason: str

    @property
    def unexplained(self) -> bool:
        """Whether it was accepted and is wrong, or nobody knows."""
        return not self.error and not self.reason


def judge_schedule(operator: str, change: str, mutant: Schedule) -> Verdict:
    """Try to prove a mutant; explain it if that succeeds."""
    try:
        proof = prove(mutant)
    except ScheduleError as error:
        return Verdict(operator, change, str(error), "")
    for mode, in_place, plans in modes(mutant):
        if replay(plans, in_place=in_place):
            return Verdict(operator, f"{change}, {mode}", "", "")
    if operator == "swap two sources":
        return Verdict(
            operator, change, "", f"the order {proof.order!r} allows it; same bits everywhere"
        )
    return Verdict(operator, change, "", "the outputs are right all the same")


def judge_plans(
    operator: str, change: str, mutant: list[Plan], in_place: bool, wait: tuple[Plan, int] | None
) -> Verdict:
    """Verify mutated plans; explain them if that succeeds.

    Args:
        operator: What kind of change it is.
        change: The change, in words.
        mutant: The plans of all ranks.
        in_place: IN and OUT may be the same memory.
        wait: Plan and instruction of a WAIT that was removed or weakened.
    """
    try:
        verify(mutant, in_place=in_place)
    except ScheduleError as error:
        return Verdict(operator, change, str(error), "")
    if replay(mutant, in_place=in_place):
        return Verdict(operator, change, "", "")
    return Verdict(operator, change, "", _reason(operator, mutant, wait))


def _reason(operator: str, mutant: list[Plan], wait: tuple[Plan, int] | None) -> str:
    """Say why plans that were executed without harm are right; empty if nothing proves it."""
    if operator in ("remove a WAIT", "wait for an earlier step"):
        if wait is None:
            return "the messages of both groups may be under way together"
        return "the rank knows it from other waits" if _is_known(mutant, *wait) else ""
    if operator == "shrink the slots by one":
        used = [
            plan.operands[plan.operands["buffer"] == PlanBuffer.CELL]["chunk"] for plan in mutant
        ]
        fits = all(
            u.max(initial=0) < p.slots or not len(u) for u, p in zip(used, mutant, strict=True)
        )
        return "the last slot is not used" if fits else ""
    return {
        "wait for a later step": "a longer wait, which ends all the same",
        "remove a SIGNAL": "a later signal of the rank ends the waits for it",
        "remove a FOLD": "the outputs are right all the same",
        "redirect an operand": "the outputs are right all the same",
    }.get(operator, "")


def _is_known(mutant: list[Plan], plan: Plan, i: int) -> bool:
    """Tell whether what a removed WAIT waited for has happened before all the same."""
    run = run_peer(Joined(mutant, ""))
    world, wait = run.world, plan.code[i]
    peer, step = int(wait["peer"]), int(wait["arg"])
    signals = (world.rank == peer) & (world.op == Opcode.SIGNAL) & (world.step >= step)
    signal = int(np.flatnonzero(signals)[0])
    weakened = len(mutant[plan.rank].code) == len(plan.code)
    mine = np.flatnonzero(world.rank == plan.rank)
    following = mine[1 + i + weakened]  # behind the caller's event
    return bool(run.clock[world.block[following], peer] >= world.place[signal])


def mutate(schedule: Schedule, *, count: int = 3, seed: int = 0) -> Iterator[Verdict]:
    """Judge mutants of a schedule and of its plans in every mode, up to ``count`` per operator."""
    for operator, change, mutant in schedule_mutants(schedule, count, seed):
        yield judge_schedule(operator, change, mutant)
    for mode, in_place, plans in modes(schedule):
        for operator, r, i, mutant in plan_mutants(plans, count, seed):
            change = f"{mode}, rank {r}, instruction {i}"
            wait = None
            if operator in ("remove a WAIT", "wait for an earlier step") and not plans[r].messages:
                wait = plans[r], i
            yield judge_plans(operator, change, mutant, in_place, wait)

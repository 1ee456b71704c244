"""Mutation: does the verifier reject plans that are wrong in one place?

Mutants are made of schedules (one fold of one rank is lost, repeated, redirected or swapped, and
the plans are compiled anew) and of lowered plans (one instruction or operand is changed). A
mutant that the verifier accepts is either still right, for a reason that is given and after
`replay` has executed it in many orders, or it shows a hole in the verifier.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Fold, Piece, Schedule
from pycoll.schedule.lowering.plan import DONE, Opcode, Plan, PlanBuffer
from pycoll.schedule.proof.bounds import Joined
from pycoll.schedule.proof.interpret_peer import run_peer
from pycoll.schedule.proof.replay import replay
from pycoll.schedule.proof.verify import modes, prove, verify

Rounds = list[list[Fold]]
Place = tuple[int, int, int]  # round, fold of the round, rank
Edit = Callable[[Fold, Schedule, random.Random], list[Fold] | None]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    operator: str  # what kind of change it is
    change: str  # the change, in words
    error: str  # why it was rejected; empty if it was accepted
    reason: str  # why an accepted one is still right; empty if nothing explains it

    @property
    def unexplained(self) -> bool:
        """Whether it was accepted, and is wrong or not shown to be right."""
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
    reason = "the outputs are right all the same"
    if operator == "swap two sources":
        reason = f"the order {proof.order!r} allows it; same bits everywhere"
    return Verdict(operator, change, "", reason)


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
        used = [p.operands["chunk"][p.operands["buffer"] == PlanBuffer.STAGING] for p in mutant]
        fits = all(np.all(u < p.slots) for u, p in zip(used, mutant, strict=True))
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


# --- Schedules ------------------------------------------------------------------------------------


def _redirect_rank(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold] | None:
    return [_moved(f, rng, rank=1)] if schedule.n > 1 else None


def _redirect_chunk(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold] | None:
    size = {buffer: schedule.chunks for buffer in Buffer} | {Buffer.TMP: schedule.slots}
    wide = [i for i, p in enumerate(f.pieces) if size[p.buffer] > 1]
    return [_moved(f, rng, chunk=1, among=wide)] if wide else None


def _moved(
    f: Fold, rng: random.Random, rank: int = 0, chunk: int = 0, among: list[int] | None = None
) -> Fold:
    pieces = [*f.srcs, *f.dsts]
    i = rng.choice(among if among is not None else range(len(pieces)))
    piece = pieces[i]
    pieces[i] = Piece(piece.rank + rank, piece.buffer, piece.chunk + chunk)
    return replace(f, srcs=tuple(pieces[: len(f.srcs)]), dsts=tuple(pieces[len(f.srcs) :]))


def _swap_sources(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold] | None:
    if len(f.srcs) < 2:
        return None
    srcs = list(f.srcs)
    i = rng.randrange(len(srcs) - 1)
    srcs[i], srcs[i + 1] = srcs[i + 1], srcs[i]
    return [replace(f, srcs=tuple(srcs))]


_EDITS: dict[str, Edit] = {
    "drop a fold": lambda f, schedule, rng: [],
    "redirect a piece to another rank": _redirect_rank,
    "redirect a piece to another chunk": _redirect_chunk,
    "swap two sources": _swap_sources,
}


def _masked(f: Fold, mask: np.ndarray) -> Fold:
    return replace(f, where=mask & np.asarray(f.where))


def _mutant(schedule: Schedule, change: Callable[..., Rounds], *args: object) -> Schedule:
    """Make a schedule whose rounds are ``change(*args, rounds, ranks)``."""
    original = schedule.algorithm.rounds

    def changed(rank: np.ndarray, n: int, **params: object) -> Iterator[list[Fold]]:
        rounds = [[r] if isinstance(r, Fold) else list(r) for r in original(rank, n, **params)]
        yield from change(*args, rounds, rank)

    return replace(schedule, algorithm=replace(schedule.algorithm, rounds=changed))


def _edited(
    place: Place, edit: Callable[[Fold], list[Fold] | None], rounds: Rounds, ranks: np.ndarray
) -> Rounds:
    """Replace one fold of one rank."""
    k, i, rank = place
    others = [*rounds[k][:i], _masked(rounds[k][i], ranks != rank), *rounds[k][i + 1 :]]
    changed = [_masked(f, ranks == rank) for f in edit(rounds[k][i]) or []]
    return [*rounds[:k], [*others, *changed], *rounds[k + 1 :]]


def _repeated(place: Place, rounds: Rounds, ranks: np.ndarray) -> Rounds:
    """Execute one fold of one rank again, in a round of its own."""
    k, i, rank = place
    return [*rounds[: k + 1], [_masked(rounds[k][i], ranks == rank)], *rounds[k + 1 :]]


def _swapped(k: int, rank: int, rounds: Rounds, ranks: np.ndarray) -> Rounds:
    """Let one rank execute rounds k and k + 1 in the other order."""
    rest = [[_masked(f, ranks != rank) for f in rounds[j]] for j in (k, k + 1)]
    mine = [[_masked(f, ranks == rank) for f in rounds[j]] for j in (k + 1, k)]
    return [*rounds[:k], rest[0] + mine[0], rest[1] + mine[1], *rounds[k + 2 :]]


def _active(schedule: Schedule) -> list[Place]:
    """List (round, fold of the round, rank) of everything that happens."""
    found = []
    everyone = schedule.all_ranks()
    for k, folds in enumerate(schedule.rounds(everyone)):
        for i, f in enumerate(folds):
            busy = np.broadcast_to(np.asarray(f.where) & (np.asarray(f.count) > 0), everyone.shape)
            found += [(k, i, int(rank)) for rank in np.flatnonzero(busy)]
    return found


def schedule_mutants(
    schedule: Schedule, count: int, seed: int
) -> Iterator[tuple[str, str, Schedule]]:
    """Yield (operator, change, mutant), up to ``count`` of each operator."""
    rng = random.Random(seed)
    places = _active(schedule)
    rounds = list(schedule.rounds(schedule.all_ranks()))
    for name, edit in _EDITS.items():
        for k, i, rank in rng.sample(places, min(count, len(places))):
            once = partial(_repeatable, edit, schedule, rng.getrandbits(32))
            if once(rounds[k][i]) is not None:
                mutant = _mutant(schedule, _edited, (k, i, rank), once)
                yield name, f"rank {rank}, round {k}", mutant
    for k, i, rank in rng.sample(places, min(count, len(places))):
        mutant = _mutant(schedule, _repeated, (k, i, rank))
        yield "repeat a fold", f"rank {rank}, round {k}", mutant
    pairs = sorted({(k, rank) for k, _, rank in places} & {(k - 1, rank) for k, _, rank in places})
    for k, rank in rng.sample(pairs, min(count, len(pairs))):
        mutant = _mutant(schedule, _swapped, k, rank)
        yield "swap a rank's rounds", f"rank {rank}, round {k}", mutant


def _repeatable(edit: Edit, schedule: Schedule, seed: int, f: Fold) -> list[Fold] | None:
    """Edit a fold the same way whenever the generator runs."""
    return edit(f, schedule, random.Random(seed))


# --- Plans ----------------------------------------------------------------------------------------


def _without(plan: Plan, i: int) -> Plan:
    return replace(plan, code=np.delete(plan.code, i))


def _with(plan: Plan, i: int, **fields: int) -> Plan:
    code = plan.code.copy()
    for name, value in fields.items():
        code[name][i] = value
    return replace(plan, code=code)


def _steps(plans: list[Plan], rank: int) -> list[int]:
    code = plans[rank].code
    return code["arg"][code["op"] == Opcode.SIGNAL].tolist()


def _shifted(plans: list[Plan], r: int, i: int, way: int) -> Plan | None:
    wait = plans[r].code[i]
    steps = _steps(plans, int(wait["peer"]))
    at = bisect_left(steps, int(wait["arg"])) + way
    return _with(plans[r], i, arg=steps[at]) if 0 <= at < len(steps) else None


def _redirected(plan: Plan, i: int, rng: random.Random) -> Plan:
    operands = plan.operands.copy()
    schedule, k = plan.schedule, int(plan.code["arg"][i])
    if plan.code["op"][i] == Opcode.FOLD:
        k += rng.randrange(int(plan.code["nsrc"][i]) + int(plan.code["ndst"][i]))
    limit = plan.slots if operands["buffer"][k] == PlanBuffer.STAGING else schedule.chunks
    if rng.random() < 0.5 and limit > 1:
        operands["chunk"][k] = (operands["chunk"][k] + 1) % limit
    else:
        operands["rank"][k] = (operands["rank"][k] + 1) % max(2, schedule.n)
    return replace(plan, operands=operands)


def _plan_edits(
    plans: list[Plan], r: int, i: int, rng: random.Random
) -> Iterator[tuple[str, Plan]]:
    """Yield the changes that can be made to one instruction, as (operator, plan of rank r)."""
    instr = plans[r].code[i]
    op, name = Opcode(instr["op"]), Opcode(instr["op"]).name
    done = op == Opcode.SIGNAL and instr["arg"] == DONE
    yield ("remove the DONE" if done else f"remove a {name}"), _without(plans[r], i)
    if op == Opcode.WAIT and not plans[r].messages:
        for way, operator in ((-1, "wait for an earlier step"), (1, "wait for a later step")):
            shifted = _shifted(plans, r, i, way)
            if shifted is not None:
                yield operator, shifted
    if op in (Opcode.FOLD, Opcode.SEND, Opcode.RECV):
        yield "redirect an operand", _redirected(plans[r], i, rng)
    if op in (Opcode.SEND, Opcode.RECV) and plans[r].schedule.n > 2:
        peer = next(p for p in range(3) if p not in (r, int(instr["peer"])))
        yield "exchange with another rank", _with(plans[r], i, peer=peer)


def plan_mutants(
    plans: list[Plan], count: int, seed: int
) -> Iterator[tuple[str, int, int, list[Plan]]]:
    """Yield (operator, rank, instruction, plans), up to ``count`` of each operator."""
    rng = random.Random(seed)
    places = [(r, i) for r, plan in enumerate(plans) for i in range(len(plan.code))]
    rng.shuffle(places)
    made: dict[str, int] = {}
    for r, i in places:
        for operator, plan in _plan_edits(plans, r, i, rng):
            made[operator] = made.get(operator, 0) + 1
            if made[operator] <= count:
                yield operator, r, i, [*plans[:r], plan, *plans[r + 1 :]]
    if plans[0].slots and not plans[0].messages:
        yield "shrink the slots by one", -1, -1, [replace(p, slots=p.slots - 1) for p in plans]
    for r in [r for r, plan in enumerate(plans) if plan.slots and plan.messages][:count]:
        shrunk = replace(plans[r], slots=plans[r].slots - 1)
        yield "shrink the slots by one", r, -1, [*plans[:r], shrunk, *plans[r + 1 :]]

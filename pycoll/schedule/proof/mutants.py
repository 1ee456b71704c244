"""Making mutants: schedules and plans that differ from right ones in one place."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pycoll.schedule.ir import Buffer, Fold, Piece, Schedule
from pycoll.schedule.lowering.plan import DONE, Opcode, Plan, PlanBuffer

Rounds = list[list[Fold]]
Place = tuple[int, int, int]  # round, fold of the round, rank
Edit = Callable[[Fold, Schedule, random.Random], list[Fold] | None]

# --- Schedules ------------------------------------------------------------------------------------


def _drop(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold]:
    return []


def _redirect_rank(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold] | None:
    return [_moved(f, rng, rank=1)] if schedule.n > 1 else None


def _redirect_chunk(f: Fold, schedule: Schedule, rng: random.Random) -> list[Fold] | None:
    pieces = f.pieces
    wide = [i for i, p in enumerate(pieces) if _places(p, schedule) > 1]
    return [_moved(f, rng, chunk=1, among=wide)] if wide else None


def _places(piece: Piece, schedule: Schedule) -> int:
    return schedule.slots if piece.buffer == Buffer.TMP else schedule.chunks


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
    "drop a fold": _drop,
    "redirect a piece to another rank": _redirect_rank,
    "redirect a piece to another chunk": _redirect_chunk,
    "swap two sources": _swap_sources,
}


def _part(f: Fold, mask: np.ndarray) -> Fold:
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
    others = [*rounds[k][:i], _part(rounds[k][i], ranks != rank), *rounds[k][i + 1 :]]
    changed = [_part(f, ranks == rank) for f in edit(rounds[k][i]) or []]
    return [*rounds[:k], [*others, *changed], *rounds[k + 1 :]]


def _repeated(place: Place, rounds: Rounds, ranks: np.ndarray) -> Rounds:
    """Execute one fold of one rank again, in a round of its own."""
    k, i, rank = place
    return [*rounds[: k + 1], [_part(rounds[k][i], ranks == rank)], *rounds[k + 1 :]]


def _swapped(k: int, rank: int, rounds: Rounds, ranks: np.ndarray) -> Rounds:
    """Let one rank execute rounds k and k + 1 in the other order."""
    rest = [[_part(f, ranks != rank) for f in rounds[j]] for j in (k, k + 1)]
    mine = [[_part(f, ranks == rank) for f in rounds[j]] for j in (k + 1, k)]
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
    limit = plan.slots if operands["buffer"][k] == PlanBuffer.CELL else schedule.chunks
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

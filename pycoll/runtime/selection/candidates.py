"""What else a call could have used: every algorithm of its collective, counted and predicted."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from pycoll.runtime.selection.select import Choice, of_collective, parameters
from pycoll.runtime.selection.tuning_table import World
from pycoll.schedule.cost.cost import cost
from pycoll.schedule.ir import Algorithm


class Candidate(NamedTuple):
    """One algorithm that was considered."""

    name: str
    rounds: int  # rounds in which data goes between ranks; 0 if it is not defined for this world
    per_rank: Fraction  # what the busiest rank sends or receives, as a fraction of the vector
    order: str
    direct: bool  # whether it would work on the arrays themselves
    predicted_s: float  # predicted time, in seconds; infinite if it is not defined for this world
    measured_s: float | None  # measured time, in seconds; None where nobody has measured it
    verdict: str  # why it was, or was not, chosen


def candidates(choice: Choice, world: World | None = None) -> list[Candidate]:
    """List all algorithms of the collective: the chosen one, then the others, fastest first.

    Each is predicted the better way that the call allows, on the arrays or staged.
    """
    request = choice.request
    times = (
        world.measured(request.collective, request.nbytes, request.direct)
        if world and not request.input_only
        else {}
    )
    known = of_collective(choice.request.collective)
    if choice.algorithm not in known:
        known.append(choice.algorithm)
    seconds = {name: time.seconds for name, time in times.items()}
    found = [_candidate(choice, algorithm, seconds) for algorithm in known]
    return sorted(
        found, key=lambda c: (c.verdict != "chosen", c.measured_s or math.inf, c.predicted_s)
    )


def _candidate(choice: Choice, algorithm: Algorithm, times: dict[str, float]) -> Candidate:
    request, machine = choice.request, choice.machine
    obstacle = request.obstacle(algorithm)
    if not algorithm.works_for(request.n):
        rest = algorithm.order, False, math.inf, None, obstacle
        return Candidate(algorithm.name, 0, Fraction(0), *rest)
    chosen = algorithm == choice.algorithm
    params = choice.params if chosen else parameters(algorithm, request)
    schedule = algorithm.schedule(request.n, **params)
    ways = [choice.direct] if chosen else {False, request.may_be_direct(algorithm)}
    seconds, direct = min((machine.predict(schedule, request.nbytes, way), way) for way in ways)
    spent = cost(schedule)
    measured, best = times.get(algorithm.name), times.get(choice.name)
    if measured and best:
        verdict = _compared(measured / best, "measured")
    else:
        verdict = _compared(_ratio(seconds, choice.predicted_s), "predicted")
    verdict = "chosen" if chosen else obstacle or verdict
    volume = spent.rounds, spent.per_rank, algorithm.order, direct
    return Candidate(algorithm.name, *volume, seconds, measured, verdict)


def _ratio(seconds: float, best: float) -> float:
    """Divide times; a machine whose synchronisation was too short to measure predicts 0."""
    return seconds / best if best else math.inf if seconds else 1.0


def _compared(ratio: float, how: str) -> str:
    if ratio > 1.005:
        return f"{ratio:.2f} times the {how} time"
    if ratio > 0.995:
        return f"{how} to take as long"
    why = {"predicted": "the table comes first", "measured": "not beyond noise"}
    return f"{ratio:.2f} times the {how} time, but {why[how]}"

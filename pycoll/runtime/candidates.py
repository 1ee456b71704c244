"""What else a call could have used: every algorithm of its collective, counted and predicted."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from pycoll.runtime.select import Choice, of_collective, parameters
from pycoll.schedule.cost import cost, predict
from pycoll.schedule.ir import Algorithm


class Candidate(NamedTuple):
    """One algorithm that was considered.

    Attributes:
        name: Its name.
        rounds: Rounds in which data goes between ranks; 0 if it is not defined for this world.
        per_rank: What the busiest rank sends or receives, as a fraction of the vector.
        order: Order it gives.
        direct: Whether it would work on the arrays themselves.
        predicted_s: Predicted time, in seconds; infinite if it is not defined for this world.
        verdict: Why it was, or was not, chosen.
    """

    name: str
    rounds: int
    per_rank: Fraction
    order: str
    direct: bool
    predicted_s: float
    verdict: str


def candidates(choice: Choice) -> list[Candidate]:
    """List all algorithms of the collective: the chosen one, then the others, fastest first.

    Each is predicted the better way that the call allows, on the arrays or staged.
    """
    known = of_collective(choice.wish.collective)
    if choice.algorithm not in known:
        known.append(choice.algorithm)
    found = [_candidate(choice, algorithm) for algorithm in known]
    return sorted(found, key=lambda c: (c.verdict != "chosen", c.predicted_s))


def _candidate(choice: Choice, algorithm: Algorithm) -> Candidate:
    wish, machine = choice.wish, choice.machine
    obstacle = wish.obstacle(algorithm)
    if not algorithm.worlds(wish.n):
        return Candidate(algorithm.name, 0, Fraction(0), algorithm.order, False, math.inf, obstacle)
    chosen = algorithm == choice.algorithm
    params = choice.params if chosen else parameters(algorithm, wish, machine)
    schedule = algorithm.schedule(wish.n, **params)
    ways = [choice.direct] if chosen else {False, wish.may_be_direct(algorithm)}
    seconds, direct = min((predict(schedule, wish.nbytes, machine, way), way) for way in ways)
    spent = cost(schedule)
    verdict = "chosen" if chosen else obstacle or _compared(seconds / choice.predicted_s)
    return Candidate(
        algorithm.name, spent.rounds, spent.per_rank, algorithm.order, direct, seconds, verdict
    )


def _compared(ratio: float) -> str:
    if ratio > 1.005:
        return f"{ratio:.2f} times the predicted time"
    if ratio > 0.995:
        return "predicted to take as long"
    return f"{ratio:.2f} times the predicted time, but the table comes first"

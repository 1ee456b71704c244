"""Timing the algorithms of a collective in turn, and deciding between them and the default."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pycoll.cli.common.machine import last_level_cache
from pycoll.cli.measure.bench_data import Problem, Slots
from pycoll.cli.measure.bench_time import Setup, back_to_back, bind
from pycoll.comm import Communicator
from pycoll.runtime.selection.select import (
    Choice,
    SelectionRequest,
    of_collective,
    parameters,
    select,
)
from pycoll.runtime.selection.tuning_table import Time, TunedRule
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.types import DType, Order

SCREENING, CONFIRMING = 3, 7  # rounds
_MOST_CALLS = 500
GAIN = 0.05  # by which a challenger has to be faster, at least
_HOPELESS = 5.0  # times the best prediction: not worth a try
_COLD_BYTES = 64 << 10  # arrays from this size on are used in turn, so that no cache holds them
DTYPE = DType.FLOAT32

Label = tuple[str, str]  # algorithm or "", order or ""


@dataclass
class Bench:
    """The ranks, how long to measure, and what was found so far."""

    comm: Communicator  # without a table of measured times
    machine: Machine | Network  # constants for predictions
    slice_s: float  # for the calls of one algorithm in one round
    times: list[Time] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def cell(self, collective: str, nbytes: int, symmetric: bool) -> None:
        """Measure a collective at one size, and decide."""
        problem = Problem.of_size(
            collective, np.dtype(np.float32), "sum", nbytes, self.comm.world_size
        )
        orders = [o.name.lower() for o in Order] if problem.promise.reduces else [""]
        usual = {order: self._select(problem, symmetric, order=order or None) for order in orders}
        able = {
            order: {
                a.name for a in of_collective(collective) if not usual[order].request.obstacle(a)
            }
            for order in orders
        }
        names = self._worth(usual[orders[-1]].request, set().union(*able.values()))
        default = {order: self._name(problem, usual[order]) for order in orders}
        labels: list[Label] = [(name, "") for name in names]
        labels += [("", order) for order in orders if default[order] not in names]
        slots = self._slots(problem, symmetric)
        found = self._contest(problem, slots, labels, SCREENING)
        for order, name in default.items():
            label = (name, "") if name in names else ("", order)
            rivals = [(n, "") for n in names if n in able[order] and n != name]
            best = self._best(problem, slots, label, rivals, found)
            times = float(np.median(found[best[0]])), name, float(np.median(found[label]))
            kind = (collective, order, symmetric, problem.nbytes)
            self.decisions.append(Decision(*kind, best[0][0] if best[1] else "", *times))
        self.times += [
            Time(collective, problem.nbytes, symmetric, *label, *_spread(rounds))
            for label, rounds in found.items()
        ]

    def _best(
        self,
        problem: Problem,
        slots: Slots,
        default: Label,
        rivals: list[Label],
        found: dict[Label, np.ndarray],
    ) -> tuple[Label, bool]:
        """Return the fastest rival, and whether it beats the default; where in doubt, once more."""
        best = min(rivals, key=lambda label: np.median(found[label]), default=default)
        promising = np.median(found[best]) <= (1 - GAIN) * np.median(found[default])
        rounds = min(len(found[best]), len(found[default]))
        if promising and rounds < CONFIRMING + SCREENING:  # not confirmed already
            again = self._contest(problem, slots, [default, best], CONFIRMING)
            for label, more in again.items():
                found[label] = np.concatenate([found[label], more])
        wins = promising and beats(found[best][-CONFIRMING:], found[default][-CONFIRMING:])
        return best, bool(wins)

    def _select(self, problem: Problem, symmetric: bool, **wanted: Any) -> Choice:
        """Return what a call does, with an order or an algorithm or neither."""
        plans = self.comm._session.plans
        return select(
            problem.name,
            problem.nbytes,
            problem.n,
            dtype=DTYPE if problem.promise.reduces else None,
            direct=symmetric,
            messages=isinstance(self.machine, Network),
            one_host=plans.one_host,
            crowded=plans.crowded,
            **wanted,
        )

    def _name(self, problem: Problem, usual: Choice) -> str:
        """What a call does by itself: the name of an algorithm if naming that does the same."""
        if self.comm._session.has_two_levels(usual):
            return "two levels"
        named = self._select(problem, usual.request.direct, algorithm=usual.algorithm)
        return usual.name if named.direct == usual.direct else f"{usual.name}, staged"

    def _worth(self, request: SelectionRequest, able: set[str]) -> list[str]:
        """Leave out what is predicted to be hopeless beside the best."""
        request = replace(request, order="any" if request.order else "")
        predicted = {}
        for algorithm in of_collective(request.collective):
            if algorithm.name in able:
                schedule = algorithm.schedule(request.n, **parameters(algorithm, request))
                direct = request.may_be_direct(algorithm)
                predicted[algorithm.name] = self.machine.predict(schedule, request.nbytes, direct)
        best = min(predicted.values())
        return [name for name, seconds in predicted.items() if seconds <= _HOPELESS * best]

    def _slots(self, problem: Problem, symmetric: bool) -> Slots:
        count = 2
        if problem.nbytes >= _COLD_BYTES:
            each = max(problem.in_count(r) + problem.out_count(r) for r in range(problem.n)) * 4
            count = min(64, max(2, math.ceil(last_level_cache() / each)))
        return Slots.make(self.comm, problem, count, symmetric, in_place=False)

    def _contest(
        self, problem: Problem, slots: Slots, labels: list[Label], rounds: int
    ) -> dict[Label, np.ndarray]:
        """Return seconds of a call on the slowest rank, of each label round by round."""
        setups = [Setup(order=order or None, algorithm=name or None) for name, order in labels]
        calls = [
            itertools.cycle([bind(self.comm, problem, setup, *pair) for pair in slots.pairs])
            for setup in setups
        ]
        counts = self._counts(calls)
        spent = np.zeros((len(labels), rounds))
        for i in range(rounds):
            for k in range(len(labels)):
                turn = (i + k) % len(labels)
                spent[turn, i] = back_to_back(self.comm, calls[turn], counts[turn])
        spent = self.comm.all_reduce(spent, "max")
        return dict(zip(labels, spent, strict=True))

    def _counts(self, calls: list[itertools.cycle]) -> list[int]:
        """How many calls fit a slice of time, alike on all ranks."""
        first = np.zeros(len(calls))
        for i, call in enumerate(calls):
            back_to_back(self.comm, call, 1)  # makes the plan
            first[i] = back_to_back(self.comm, call, 2)
        first = self.comm.all_reduce(first, "max")
        return [int(min(max(self.slice_s / max(s, 1e-9), 1), _MOST_CALLS)) for s in first]


def _spread(rounds: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(rounds)), float(rounds.min()), float(rounds.max())


def cells(names: list[str], sizes: list[int], messages: bool) -> list[tuple[str, int, bool]]:
    """List what to measure, small sizes first: in ordinary memory, and in symmetric memory.

    A call is in symmetric memory only where every rank passes all arrays.
    """
    both = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
    return [
        (name, size, symmetric)
        for size in sizes
        for name in names
        for symmetric in ((False, True) if name in both and not messages else (False,))
    ]


# --- From times to rules --------------------------------------------------------------------------


def beats(challenger: Sequence[float], default: Sequence[float]) -> bool:
    """Tell whether an algorithm was faster than the default beyond noise.

    Both were measured in turn, in the same rounds. The challenger has to gain `GAIN` by the median,
    and all its rounds but the slowest have to be faster than all rounds of the default but the
    fastest: one disturbed round on either side decides nothing. Anything less keeps the default.
    Times are seconds of a call, round by round, three rounds or more.
    """
    gain = statistics.median(challenger) <= (1 - GAIN) * statistics.median(default)
    return gain and sorted(challenger)[-2] < sorted(default)[1]


@dataclass(frozen=True)
class Decision:
    """What follows from the measurements at one size; see `TunedRule`."""

    collective: str
    order: str
    symmetric: bool
    nbytes: int  # the size that was measured
    algorithm: str  # what beats the default; "" if nothing does
    seconds: float  # its median time
    default: str  # what is taken without measurement
    default_seconds: float

    @property
    def kind(self) -> tuple[str, str, bool]:
        """Which calls it is about, sizes apart."""
        return self.collective, self.order, self.symmetric


def between(small: int, large: int) -> int:
    """Return where one size becomes the other: the geometric mean."""
    return math.isqrt(small * large)


def rules_of(decisions: Iterable[Decision]) -> list[TunedRule]:
    """Join decisions at neighbouring sizes into lines of the table.

    A line reaches half-way, by ratio, to the next size at which something else was decided; below
    the smallest size that was measured to nothing, and above the largest by a factor of 1.4 only.
    """
    found: list[TunedRule] = []
    ordered = sorted(decisions, key=lambda d: (d.kind, d.nbytes))
    for _, group in itertools.groupby(ordered, key=lambda d: d.kind):
        row = list(group)
        low = 0
        for i, decision in enumerate(row):
            last = i + 1 == len(row)
            if not last and row[i + 1].algorithm == decision.algorithm:
                continue
            edge = decision.nbytes * math.sqrt(2)
            high = int(edge) if last else between(decision.nbytes, row[i + 1].nbytes)
            same = [d for d in row[: i + 1] if low <= d.nbytes]
            if decision.algorithm:
                found.append(_rule(same, low, high))
            low = high + 1
    return found


def _rule(same: list[Decision], low: int, high: int) -> TunedRule:
    best = min(same, key=lambda d: d.seconds / d.default_seconds)
    names = best.algorithm, best.seconds, best.default, best.default_seconds
    return TunedRule(*best.kind, low, high, *names)


def crossings(decisions: Iterable[Decision]) -> list[tuple[str, bool, int]]:
    """List the sizes half-way between neighbours that were decided differently, worth a look."""
    found = set()
    ordered = sorted(decisions, key=lambda d: (d.kind, d.nbytes))
    for a, b in itertools.pairwise(ordered):
        if a.kind == b.kind and a.algorithm != b.algorithm:
            found.add((a.collective, a.symmetric, between(a.nbytes, b.nbytes) // 8 * 8))
    return sorted(found)

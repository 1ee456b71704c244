"""Timing the algorithms of a collective in turn, and deciding between them and the default."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pycoll.cli.common.machine import last_level_cache
from pycoll.cli.measure.bench_data import Problem, Slots
from pycoll.cli.measure.bench_time import Setup, bind
from pycoll.cli.measure.tune_rules import GAIN, Decision, beats
from pycoll.comm import Communicator
from pycoll.runtime.selection.select import (
    Choice,
    SelectionRequest,
    of_collective,
    parameters,
    select,
)
from pycoll.runtime.selection.tuning_table import Time
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.types import DType, Order

SCREENING, CONFIRMING = 3, 7  # rounds
_MOST_CALLS = 500
_HOPELESS = 5.0  # times the best prediction: not worth a try
_COLD_BYTES = 64 << 10  # arrays from this size on are used in turn, so that no cache holds them
DTYPE = DType.FLOAT32

Label = tuple[str, str]  # algorithm or "", order or ""


@dataclass
class Bench:
    """The ranks, and how long to measure.

    Attributes:
        comm: The ranks; without a table of measured times.
        machine: Constants for predictions.
        slice_s: Time for the calls of one algorithm in one round.
        times: What was measured so far.
        decisions: What follows from it.
    """

    comm: Communicator
    machine: Machine | Network
    slice_s: float
    times: list[Time] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def messages(self) -> bool:
        """Whether ranks send messages."""
        return isinstance(self.machine, Network)

    def cell(self, collective: str, nbytes: int, symmetric: bool) -> None:
        """Measure a collective at one size, and decide."""
        comm = self.comm
        problem = Problem.of_size(collective, np.dtype(np.float32), "sum", nbytes, comm.world_size)
        orders = [o.name.lower() for o in Order] if problem.promise.reduces else [""]
        usual = {order: self._usual(problem, order, symmetric) for order in orders}
        able = {order: self._able(problem, order, symmetric) for order in orders}
        names = self._worth(problem, symmetric, set().union(*able.values()))
        labels: list[Label] = [(name, "") for name in names]
        labels += [("", order) for order in orders if self._name(usual[order]) not in names]
        slots = self._slots(problem, symmetric)
        found = self._contest(problem, slots, labels, SCREENING)
        for order in orders:
            name = self._name(usual[order])
            default = (name, "") if name in names else ("", order)
            rivals = [(n, "") for n in names if n in able[order] and n != name]
            self._decide(problem, slots, symmetric, order, name, default, rivals, found)
        self.times += [
            Time(collective, problem.nbytes, symmetric, *label, *_spread(rounds))
            for label, rounds in found.items()
        ]

    def _decide(
        self,
        problem: Problem,
        slots: Slots,
        symmetric: bool,
        order: str,
        name: str,
        default: Label,
        rivals: list[Label],
        found: dict[Label, np.ndarray],
    ) -> None:
        best = min(rivals, key=lambda label: np.median(found[label]), default=default)
        promising = np.median(found[best]) <= (1 - GAIN) * np.median(found[default])
        rounds = min(len(found[best]), len(found[default]))
        if promising and rounds < CONFIRMING + SCREENING:  # not confirmed already
            again = self._contest(problem, slots, [default, best], CONFIRMING)
            for label, rounds in again.items():
                found[label] = np.concatenate([found[label], rounds])
        wins = promising and beats(found[best][-CONFIRMING:], found[default][-CONFIRMING:])
        self.decisions.append(
            Decision(
                problem.name,
                order,
                symmetric,
                problem.nbytes,
                best[0] if wins else "",
                float(np.median(found[best])),
                name,
                float(np.median(found[default])),
            )
        )

    def _wish(self, problem: Problem, order: str, symmetric: bool) -> SelectionRequest:
        dtype = DTYPE if problem.promise.reduces else None
        return SelectionRequest(
            problem.name,
            problem.nbytes,
            problem.n,
            order,
            dtype,
            direct=symmetric,
            messages=self.messages,
            one_host=self.comm._session.plans.one_host,
            crowded=self.comm._session.plans.crowded,
        )

    def _usual(self, problem: Problem, order: str, symmetric: bool) -> Choice:
        dtype = DTYPE if problem.promise.reduces else None
        return select(
            problem.name,
            problem.nbytes,
            problem.n,
            order=order or None,
            dtype=dtype,
            direct=symmetric,
            messages=self.messages,
            one_host=self.comm._session.plans.one_host,
            crowded=self.comm._session.plans.crowded,
        )

    def _name(self, usual: Choice) -> str:
        """What a call does by itself: the name of an algorithm if naming that does the same."""
        wish = usual.request
        if self.comm._session.has_two_levels(usual):
            return "two levels"
        named = select(
            wish.collective,
            wish.nbytes,
            wish.n,
            dtype=wish.dtype,
            direct=wish.direct,
            algorithm=usual.algorithm,
            messages=self.messages,
            one_host=usual.request.one_host,
            crowded=usual.request.crowded,
        )
        return usual.name if named.direct == usual.direct else f"{usual.name}, staged"

    def _able(self, problem: Problem, order: str, symmetric: bool) -> set[str]:
        wish = self._wish(problem, order, symmetric)
        return {a.name for a in of_collective(problem.name) if not wish.obstacle(a)}

    def _worth(self, problem: Problem, symmetric: bool, able: set[str]) -> list[str]:
        """Leave out what is predicted to be hopeless beside the best."""
        wish = self._wish(problem, "any" if problem.promise.reduces else "", symmetric)
        predicted = {}
        for algorithm in of_collective(problem.name):
            if algorithm.name in able:
                schedule = algorithm.schedule(problem.n, **parameters(algorithm, wish))
                direct = wish.may_be_direct(algorithm)
                predicted[algorithm.name] = self.machine.predict(schedule, problem.nbytes, direct)
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
                self.comm.barrier()
                spent[turn, i] = _run(calls[turn], counts[turn])
        spent = self.comm.all_reduce(spent, "max")
        return dict(zip(labels, spent, strict=True))

    def _counts(self, calls: list[itertools.cycle]) -> list[int]:
        """How many calls fit a slice of time, alike on all ranks."""
        first = np.zeros(len(calls))
        for i, call in enumerate(calls):
            _run(call, 1)  # makes the plan
            first[i] = _run(call, 2)
        first = self.comm.all_reduce(first, "max")
        return [int(min(max(self.slice_s / max(s, 1e-9), 1), _MOST_CALLS)) for s in first]


def _run(calls: itertools.cycle, count: int) -> float:
    """Make some calls back to back; return seconds a call."""
    start = time.perf_counter()
    for call in itertools.islice(calls, count):
        call()
    return (time.perf_counter() - start) / count


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


Say = Callable[[str], None]

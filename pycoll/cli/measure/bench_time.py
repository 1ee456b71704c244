"""Timing a collective: one call at a time, and back to back; and checking what it computed."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.cli.common.machine import last_level_cache
from pycoll.cli.measure.bench_data import V_VARIANTS, Problem, Slots
from pycoll.comm import Communicator
from pycoll.runtime.calls.prepare import reached
from pycoll.runtime.selection.select import select
from pycoll.schedule.cost.cost import busbw_factor
from pycoll.schedule.ir import Algorithm
from pycoll.types import DType, Kind, ReduceOp

MAX_SLOTS = 64
STREAMS = 5  # runs of the streaming cadence, of which the median counts
_WARM_UP = 3


@dataclass(frozen=True)
class Setup:
    """How to measure; alike on all ranks."""

    order: str | None = None
    algorithm: str | Algorithm | None = None
    symmetric: bool = False  # arrays lie in symmetric memory
    symmetric_input: bool = False  # only the inputs do
    hot: bool = False  # the same arrays in every call
    iters: int | None = None  # calls for each number; None: as many as fit `budget_s`
    budget_s: float = 0.2  # for one number


@dataclass(frozen=True)
class Row:
    """What was measured at one size, in one place; times are those of the slowest rank."""

    collective: str
    dtype: str
    op: str
    root: int
    in_place: bool
    schedule: str  # algorithm that ran, and how it reached the arrays
    nbytes: int  # of the full vector
    count: int  # its elements
    slots: int  # pairs of arrays that were used in turn
    iters: int  # calls behind each number
    ranks: int
    time_us: float  # median of calls that all ranks started together
    mean_us: float
    min_us: float
    p99_us: float
    max_us: float
    stream_us: float  # of a call when calls follow each other without a pause
    algbw: float  # GB/s (10^9), from time_us
    busbw: float
    wrong: int  # elements, over all ranks


Call = Callable[[], Any]


def bind(
    comm: Communicator, problem: Problem, setup: Setup, x: np.ndarray | None, out: np.ndarray | None
) -> Call:
    """Return a call of the collective on one pair of arrays."""
    if problem.name == "barrier":
        return comm.barrier
    options: dict[str, Any] = {"out": out}
    promise = problem.promise
    if promise.reduces:
        options |= {"op": problem.op, "order": setup.order}
    if promise.rooted:
        options["root"] = problem.root
    if problem.name in ("scatter_v", "reduce_scatter_v", "all_to_all_v"):
        options["counts"] = list(problem.blocks)
    if problem.name not in V_VARIANTS:
        options["algorithm"] = setup.algorithm
    return functools.partial(getattr(comm, problem.name), x, **options)


def schedule_name(comm: Communicator, problem: Problem, setup: Setup) -> str:
    """Tell which algorithm the selector takes for this call, and whether arrays are staged.

    It decides as it does in the call, where arrays count as symmetric only if every rank can tell.
    """
    messages = not comm.transport.startswith("shared memory")
    staged = ", messages" if messages else ", staged"
    if problem.name == "barrier":
        return ("recursive_doubling" if messages else "one_shot") + staged
    if problem.name in V_VARIANTS:
        return f"direct{staged}"
    promise, kind = problem.promise, Kind[problem.name.upper()]
    symmetric = setup.symmetric or setup.symmetric_input
    direct, input_only = reached(kind, symmetric, setup.symmetric)
    choice = select(
        problem.name,
        problem.nbytes,
        problem.n,
        order=setup.order,
        dtype=DType[problem.dtype.name.upper()] if promise.reduces else None,
        op=ReduceOp[problem.op.upper()],
        direct=direct and not messages,
        input_only=input_only and not messages,
        algorithm=setup.algorithm,
        messages=messages,
        one_host=comm._session.plans.one_host,
        crowded=comm._session.plans.crowded,
        world=comm._session.plans.world,
    )
    by_default = setup.algorithm is None and choice.measured is None
    if by_default and comm._session.has_two_levels(choice):
        return "two levels"
    return choice.name + ("" if choice.direct else staged)


def slot_count(problem: Problem, setup: Setup, in_place: bool) -> int:
    """How many pairs of arrays it takes to fill the last-level cache twice, within reason."""
    if setup.hot:
        return 1
    sizes = [(problem.in_count(r), problem.out_count(r)) for r in range(problem.n)]
    each = sum(max(pair) if in_place else sum(pair) for pair in sizes)
    wanted = math.ceil(2 * last_level_cache() / max(1, each * problem.dtype.itemsize))
    return min(max(2, wanted), MAX_SLOTS)


def measure(
    comm: Communicator, problem: Problem, setup: Setup, in_place: bool, say: Callable[[str], None]
) -> Row:
    """Measure and check one collective at one size; every rank gets the same row.

    `say` takes what is going on.
    """
    say("filling memory")
    count = slot_count(problem, setup, in_place)
    symmetric = setup.symmetric or setup.symmetric_input
    slots = Slots.make(comm, problem, count, symmetric, in_place, setup.symmetric)
    calls = [bind(comm, problem, setup, *pair) for pair in slots.pairs]
    say("checking")
    for call in calls:
        call()
    wrong = slots.wrong()
    iters = setup.iters or _affordable(comm, calls, setup.budget_s)
    say(f"{iters} calls, one at a time")
    alone = isolated(comm, calls, iters)
    say(f"{iters} calls, back to back")
    together = streaming(comm, calls, iters)
    if in_place:  # every call has changed its own input
        slots.fill()
        for call in calls:
            call()
    wrong += slots.wrong()
    return Row(
        collective=problem.name,
        dtype=problem.dtype.name,
        op=problem.op if problem.promise.reduces else "none",
        root=problem.root if problem.promise.rooted else -1,
        in_place=in_place,
        schedule=schedule_name(comm, problem, setup),
        nbytes=problem.nbytes,
        count=problem.count,
        slots=count,
        iters=iters,
        ranks=problem.n,
        wrong=int(comm.all_reduce(np.array([wrong]), "sum")[0]),
        **_numbers(problem, alone, together),
    )


def isolated(comm: Communicator, calls: list[Call], iters: int) -> np.ndarray:
    """Time calls each after a barrier; return the slowest rank's seconds of each call."""
    spent = np.empty(iters)
    clock, barrier = time.perf_counter, comm.barrier
    for i, call in enumerate(itertools.islice(itertools.cycle(calls), iters)):
        barrier()
        start = clock()
        call()
        spent[i] = clock() - start
    return comm.all_gather(spent).reshape(comm.world_size, iters).max(axis=0)


def streaming(comm: Communicator, calls: list[Call], iters: int) -> float:
    """Time calls back to back; return seconds a call on the slowest rank."""
    turns, each = itertools.cycle(calls), max(1, iters // STREAMS)
    means = [back_to_back(comm, turns, each) for _ in range(STREAMS)]
    return float(np.median(comm.all_reduce(np.array(means), "max")))


def back_to_back(comm: Communicator, calls: Iterator[Call], count: int) -> float:
    """Meet, then make the next so many calls; return seconds a call."""
    comm.barrier()
    start = time.perf_counter()
    for call in itertools.islice(calls, count):
        call()
    return (time.perf_counter() - start) / count


def _affordable(comm: Communicator, calls: list[Call], budget_s: float) -> int:
    turns = itertools.cycle(calls)
    back_to_back(comm, turns, _WARM_UP)
    each = comm.all_reduce(np.array([back_to_back(comm, turns, _WARM_UP)]), "max")[0]
    return int(min(max(budget_s / max(each, 1e-9), 10), 2000))


def _numbers(problem: Problem, alone: np.ndarray, together: float) -> dict[str, float]:
    p50, p99 = np.percentile(alone, [50, 99])
    algbw = problem.nbytes / p50 / 1e9
    name = problem.name.removesuffix("_v")
    return {
        "time_us": float(p50) * 1e6,
        "mean_us": float(alone.mean()) * 1e6,
        "min_us": float(alone.min()) * 1e6,
        "p99_us": float(p99) * 1e6,
        "max_us": float(alone.max()) * 1e6,
        "stream_us": together * 1e6,
        "algbw": float(algbw),
        "busbw": float(algbw * busbw_factor(name, problem.n)) if problem.nbytes else 0.0,
    }

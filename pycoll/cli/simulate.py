"""``pycoll simulate``: how long collectives take on a network, by algorithm, up to 65,536 ranks."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycoll.cli.common.arguments import (
    ALGORITHM,
    at_least,
    check_drawing,
    check_writable,
    lookup,
    one_of,
    put,
    size,
)
from pycoll.cli.common.text import show_size, show_time, table
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.runtime.selection.select import of_collective
from pycoll.schedule.cost.cost import busbw_factor
from pycoll.schedule.cost.described import describe, fabric, seconds
from pycoll.schedule.cost.fabric import Fabric, speeds_of
from pycoll.schedule.cost.figures import picture
from pycoll.schedule.cost.simulate import Loads, simulate
from pycoll.schedule.cost.torus import Torus
from pycoll.schedule.ir import Algorithm, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.language.promise import check_sizes
from pycoll.schedule.pictures import saved

MOST_RANKS = 1 << 16
_PICTURE_SIZES = [1 << shift for shift in range(10, 41, 5)]


def add_parser(subparsers: Any) -> None:
    """Add ``simulate`` to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Predict how long a collective takes on a network: one algorithm, or all of "
        f"them side by side.\n\nnetworks, with their defaults:\n{describe()}",
    )
    add, known = parser.add_argument, sorted(COLLECTIVES)
    add("collective", type=one_of(known), metavar="collective", help=", ".join(known))
    add("--algorithm", metavar="NAME", help=f"only this one: a name, {ALGORITHM}")
    add("-n", type=int, default=64, help=f"number of ranks, at most {MOST_RANKS} (default 64)")
    add("--bytes", type=size, default=1 << 20, help="size of the full vector: 8, 1K, 1M (default)")
    add("--network", default="switch", metavar="KIND:NAME=VALUE,...", help="see above (switch)")
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--param", **several, metavar="NAME=VALUE", help="of the algorithm, such as local=8")
    add("--late", **several, metavar="RANK=TIME", help="a rank that enters late: 17=10ms")
    add("--start", type=Path, metavar="FILE", help="JSON: seconds at which each rank enters")
    add("--dead", **several, type=int, metavar="RANK", help="a rank that never enters")
    add("--link", **several, metavar="NAME=PART", help="a slow link: up[3]=0.5; 0 is down")
    add("--noise", metavar="TIME", help="what a rank loses in a round, on average")
    add("--seed", type=int, default=0, help="of the noise")
    add("--most", type=float, default=20.0, metavar="S", help="seconds for an algorithm (20)")
    add("--plot", type=Path, metavar="FILE", help="draw time by size, and how busy links are")
    add("--json", type=Path, metavar="FILE", help="also write the results as JSON")


@dataclass(frozen=True)
class _Case:
    """What is simulated, whatever the algorithm."""

    collective: str
    fabric: Fabric
    start: np.ndarray
    noise_s: float
    seed: int
    most_s: float

    def run(self, schedule: Schedule, nbytes: int) -> tuple[np.ndarray, Loads]:
        """Return finish times and what links carried."""
        rng, loads = np.random.default_rng(self.seed), Loads()
        noise = (lambda _: rng.exponential(self.noise_s, schedule.n)) if self.noise_s else None
        finish = simulate(
            schedule,
            nbytes,
            self.fabric,
            start=self.start,
            noise=noise,
            loads=loads,
            most_s=self.most_s,
        )
        return finish, loads


@dataclass(frozen=True)
class _Result:
    """One algorithm."""

    schedule: Schedule
    finish: np.ndarray
    loads: Loads
    took_s: float

    @property
    def seconds(self) -> float:
        """When the last rank that finishes at all has finished."""
        finite = self.finish[np.isfinite(self.finish)]
        return float(finite.max()) if len(finite) else float("inf")


def main(args: argparse.Namespace) -> int:
    """Simulate, and print what was found."""
    case = _case(args)
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path is not None:
            check_writable(option, path)
    if args.plot is not None:
        check_drawing("--plot")
    results, left_out = _all(case, _schedules(args, case.fabric), args.bytes)
    print(_headline(args, case))
    print(_table(case, results, args.bytes))
    for text in left_out:
        print(f"left out: {text}")
    if args.algorithm:
        print(f"\n{_links(case.fabric, results[0])}")
    if args.json is not None:
        put(args.json, json.dumps([_facts(each, case) for each in results], indent=1) + "\n")
    if args.plot is not None:
        _plot(args, case, results)
    return 0


def _case(args: argparse.Namespace) -> _Case:
    at_least("-n", args.n, 1)
    at_least("--bytes", args.bytes, 1)
    at_least("--seed", args.seed, 0)
    if math.isnan(args.most):
        raise ArgumentError("--most is nan, expected seconds")
    if args.n > MOST_RANKS:
        raise ArgumentError(f"-n is {args.n}, expected at most {MOST_RANKS} ranks")
    pairs = [_pair("--link", text) for text in args.link]
    network = fabric(args.network, args.n, speeds_of({k: _real("--link", v) for k, v in pairs}))
    noise = seconds(args.noise) if args.noise else 0.0
    return _Case(args.collective, network, _start(args), noise, args.seed, args.most)


def _start(args: argparse.Namespace) -> np.ndarray:
    """Return when each rank enters."""
    start = np.zeros(args.n)
    if args.start is not None:
        try:
            start = np.array(json.loads(args.start.read_text(encoding="utf-8")), float)
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError(f"--start {args.start}: {error}") from None
        if start.shape != (args.n,):
            raise ArgumentError(
                f"--start {args.start} has shape {start.shape}, expected ({args.n},)"
            )
        if not np.all(start >= 0):
            raise ArgumentError(f"--start {args.start}: expected seconds, 0 or more")
    late = [(name, seconds(value)) for name, value in (_pair("--late", x) for x in args.late)]
    for name, value in [*late, *((str(rank), np.inf) for rank in args.dead)]:
        if not name.isdecimal() or int(name) >= args.n:
            raise ArgumentError(f"there is no rank {name}; ranks are 0 to {args.n - 1}")
        start[int(name)] = max(start[int(name)], value)
    return start


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise ArgumentError(f"{option} is {text!r}, expected NAME=VALUE")
    return name, value


def _real(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"{option}: {text!r} is no number") from None


def _schedules(args: argparse.Namespace, network: Fabric) -> list[Schedule]:
    """Return the schedules of what was asked for; of all, hierarchies and grids fit the network."""
    given = {}
    for text in args.param:
        name, value = _pair("--param", text)
        given[name] = int(_real("--param", value))
    if args.algorithm:
        made = [lookup(args.algorithm, args.collective).schedule(args.n, **given)]
    else:
        every = [a for a in of_collective(args.collective) if a.works_for(args.n)]
        moves = {a.name.removesuffix("_rank"): a for a in reversed(every)}  # orders move the same
        made = [_fitting(a, args.n, given, network) for a in every if a in moves.values()]
    for schedule in made:
        check_sizes(schedule)
    return made


def _fitting(algorithm: Algorithm, n: int, given: dict[str, int], network: Fabric) -> Schedule:
    params = {name: value for name, value in given.items() if name in algorithm.params}
    if isinstance(network, Torus) and "axes" in algorithm.params:
        params = {"axes": len(network.dims)} | params
    if algorithm.params.get("local") == 0 and 1 < network.near < n and "local" not in params:
        try:
            schedule = algorithm.schedule(n, local=network.near, **params)
            _ = schedule.chunks  # refuses groups that do not divide the world
        except ScheduleError:
            pass
        else:
            return schedule
    return algorithm.schedule(n, **params)


def _all(case: _Case, schedules: list[Schedule], nbytes: int) -> tuple[list[_Result], list[str]]:
    """Simulate each; return results, fastest first, and why others have none."""
    found, left_out = [], []
    for schedule in schedules:
        started = time.perf_counter()
        try:
            finish, loads = case.run(schedule, nbytes)
        except (ArgumentError, ScheduleError) as error:
            if len(schedules) == 1:
                raise
            left_out.append(str(error))
        else:
            found.append(_Result(schedule, finish, loads, time.perf_counter() - started))
    if not found:
        raise ArgumentError(f"none could be simulated: {'; '.join(left_out)}")
    return sorted(found, key=lambda each: each.seconds), left_out


# --- Output ---------------------------------------------------------------------------------------


def _headline(args: argparse.Namespace, case: _Case) -> str:
    parts = [f"{args.collective} of {show_size(args.bytes)} on {args.n:,} ranks, {args.network}"]
    dead = int(np.isinf(case.start).sum())
    late = float(case.start[np.isfinite(case.start)].max(initial=0.0))
    parts += [f"the last rank enters at {show_time(late)}"] * (late > 0)
    parts += [f"dead ranks: {dead}"] * (dead > 0)
    parts += [f"{name} at {part:g} of its speed" for name, part in case.fabric.speeds]
    parts += [f"noise of {show_time(case.noise_s)} in a round"] * (case.noise_s > 0)
    return "; ".join(parts)


def _table(case: _Case, results: list[_Result], nbytes: int) -> str:
    best = results[0].seconds
    waiting = any(np.isinf(each.finish).any() for each in results)
    head = ["algorithm", "time", "of best", "algbw", "busbw", "rounds", "busiest link", "busy"]
    head += ["never finish"] * waiting
    rows = []
    for each in results:
        name, busy = _busiest(case.fabric, each)
        algbw = nbytes / each.seconds if np.isfinite(each.seconds) and each.seconds > 0 else 0.0
        busbw = algbw * busbw_factor(case.collective, case.fabric.n)
        row = [
            _title(each.schedule),
            show_time(each.seconds),
            f"{each.seconds / best:.2f}" if np.isfinite(each.seconds) and best > 0 else "-",
            f"{algbw / 1e9:.3g} GB/s",
            f"{busbw / 1e9:.3g} GB/s",
            f"{sum(times for times, _ in each.loads.rounds):,}",
            name,
            f"{busy:.0%}",
        ]
        rows.append(row + [f"{int(np.isinf(each.finish).sum()):,}"] * waiting)
    return table(head, rows, right=(1, 2, 3, 4, 5, 7, 8))


def _title(schedule: Schedule) -> str:
    extra = ",".join(f"{k}={v}" for k, v in schedule.params.items() if k != "root" and v)
    return f"{schedule.algorithm.name}({extra})" if extra else schedule.algorithm.name


def _busiest(network: Fabric, result: _Result) -> tuple[str, float]:
    """Return the link that is busy longest, and for which part of the time."""
    busy = np.atleast_1d(result.loads.busy)[:-1]
    if not len(busy) or busy.max() == 0:
        return "-", 0.0
    place = int(np.argmax(busy))
    part = busy[place] / result.seconds if np.isfinite(busy[place]) else 1.0
    return network.name(place), float(part)


def _links(network: Fabric, result: _Result) -> str:
    """Return a table of the classes of links."""
    rows = []
    for name, speeds in network.links().items():
        busy = np.atleast_1d(result.loads.busy)[network.first[name] :][: len(speeds)]
        if not len(busy):
            continue
        place = int(np.argmax(busy))
        numbers = [busy.max(), busy.mean()]
        speed = f"{speeds[0] / 1e9:g} GB/s"
        rows.append([name, f"{len(speeds):,}", speed, f"{name}[{place}]", *map(show_time, numbers)])
    head = ["links", "number", "speed", "busiest", "busy", "busy on average"]
    return table(head, rows, right=(1, 2, 4, 5))


def _facts(result: _Result, case: _Case) -> dict[str, Any]:
    name, busy = _busiest(case.fabric, result)
    return {
        "collective": case.collective,
        "algorithm": result.schedule.algorithm.name,
        "params": result.schedule.params,
        "n": result.schedule.n,
        "seconds": result.seconds if np.isfinite(result.seconds) else None,
        "first_s": float(result.finish.min()) if np.isfinite(result.finish.min()) else None,
        "never_finish": int(np.isinf(result.finish).sum()),
        "rounds": sum(times for times, _ in result.loads.rounds),
        "busiest_link": name,
        "busy_part": busy,
        "simulated_in_s": result.took_s,
    }


def _plot(args: argparse.Namespace, case: _Case, results: list[_Result]) -> None:
    sizes = [nbytes for nbytes in _PICTURE_SIZES if nbytes < args.bytes] + [args.bytes]
    times = {
        _title(each.schedule): [
            *((nbytes, float(case.run(each.schedule, nbytes)[0].max())) for nbytes in sizes[:-1]),
            (args.bytes, float(each.finish.max())),
        ]
        for each in results
    }
    name = _title(results[0].schedule)
    figure = picture(_headline(args, case), times, case.fabric, name, results[0].loads)
    put(args.plot, saved(figure, str(args.plot), dpi=110))
    print(f"drew {args.plot}")

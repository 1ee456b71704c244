"""``pycoll tune``: measure this machine, or the hosts of a job, and let times choose algorithms."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pycoll.cli import run
from pycoll.cli.common.arguments import at_least, check_table, put, size
from pycoll.cli.common.text import show_size, show_time, table
from pycoll.cli.measure.tune_machine import LEAST, machine_of
from pycoll.cli.measure.tune_times import Bench, cells, crossings, rules_of
from pycoll.comm import Communicator
from pycoll.config import TRANSPORTS, tuning_path
from pycoll.errors import ArgumentError
from pycoll.runtime.selection.measured_choices import describe
from pycoll.runtime.selection.tuning_table import TunedRule, Tuning, World, fingerprint, read_text
from pycoll.runtime.startup.mpi import under_launcher
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.schedule.language.collectives import COLLECTIVES

SIZES = tuple(64 << 2 * i for i in range(9))  # 64 B to 4 MiB
_LABELS = 7  # timings of a cell, as a guess
_ROUNDS = 4
_SHARE = 0.5  # of the budget for calls that are timed; the rest is preparation
_MOST_S = 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune`` to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure, and let the times choose algorithms",
        description="Measure all algorithms and write a table of what is faster than the built-in "
        "choice. Give -n on one machine; on several hosts start it with mpiexec, without -n. "
        "pycoll.init() finds the table by itself; docs/tuning.md says more.",
    )
    add = parser.add_argument
    add("-n", metavar="N,N", help="numbers of ranks, such as 2,4 (2, and all cores)")
    add("-o", "--output", type=Path, metavar="FILE", help=f"the table ({tuning_path()})")
    add("--budget", type=float, default=45.0, metavar="S", help="seconds for all of it (45)")
    add("--only", metavar="C,C", help="collectives, such as all_reduce,broadcast")
    add("--max", type=size, default=SIZES[-1], metavar="B", help="largest size (4M)")
    add("--transport", choices=list(TRANSPORTS), help="mpi: messages, on one host too")
    add("--part", type=Path, help=argparse.SUPPRESS)  # where a rank 0 leaves a world


def main(args: argparse.Namespace) -> int:
    """Measure, or start the ranks that do, and write the table."""
    names = names_of(args.only)
    if not 1 <= args.budget <= _MOST_S:
        raise ArgumentError(f"--budget is {args.budget}, expected seconds from 1 to {_MOST_S:.0f}")
    at_least("--max", args.max, SIZES[0])
    check_table("--output", args.output or tuning_path())
    if under_launcher():
        if args.n is not None:
            raise ArgumentError("-n is for a machine; under a launcher its ranks are measured")
        return _measure(args, names)
    path = args.output or tuning_path()
    counts = _counts(args.n)
    if args.transport == "mpi":
        raise ArgumentError("--transport mpi is for ranks that mpiexec has started, without -n")
    for n in counts:
        status = _start(args, path, n, args.budget / len(counts))
        if status:
            return status
    return 0


def names_of(only: str | None) -> list[str]:
    """Return the collectives to measure, each once: two series of one would be taken for one."""
    names = list(COLLECTIVES) if only is None else only.split(",")
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        known = ", ".join(COLLECTIVES)
        raise ArgumentError(f"--only {', '.join(unknown)} is not known; accepted: {known}")
    return list(dict.fromkeys(names))


def _counts(text: str | None) -> list[int]:
    if text is None:
        return sorted({2, max(2, len(os.sched_getaffinity(0)))})
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ArgumentError(f"-n is {text!r}, expected numbers of ranks above 1, such as 2,4")
    counts = sorted({int(part) for part in parts})
    if counts[-1] > run.MAX_RANKS:
        raise ArgumentError(f"-n is {text!r}, expected at most {run.MAX_RANKS} ranks")
    return counts


def _start(args: argparse.Namespace, path: Path, n: int, budget: float) -> int:
    """Measure with n ranks on this machine, and put what was found into the table."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        words = ["--part", str(part), "--budget", str(budget), "--max", str(args.max)]
        words += ["--only", args.only] if args.only else []
        status = run.main_of_pycoll(n, ["tune", *words])
        if status == 0:
            save(path, Tuning.parse(part.read_text(encoding="utf-8")).worlds[0])
    return status


def _measure(args: argparse.Namespace, names: list[str]) -> int:
    import pycoll

    with pycoll.init(transport=args.transport, tuning="off") as comm:
        if comm.world_size < 2:
            raise ArgumentError("with one rank there is nothing to measure; -n 2,4 starts more")
        world = measure(comm, names, args.budget, args.max)
        if comm.rank == 0:
            report(world)
            if args.part:
                put(args.part, Tuning(fingerprint(), (world,)).to_json())
            else:
                save(args.output or tuning_path(), world)
    return 0


def measure(comm: Communicator, names: list[str], budget: float, largest: int) -> World:
    """Measure; a collective of all ranks, who get the same world.

    Sizes go up, each only if what is left of the time can be expected to do; then come sizes
    half-way between neighbours that were decided differently. `budget` is in seconds, for all of
    it, and `largest` the largest size in bytes.
    """
    start = time.monotonic()
    live = _Live(comm, budget, start)
    live.say("the constants of the machine")
    machine = machine_of(comm)
    sizes = [nbytes for nbytes in SIZES if nbytes <= largest]
    work = cells(names, sizes, isinstance(machine, Network))
    slice_s = min(0.01, _SHARE * budget / (len(work) * _LABELS * _ROUNDS))
    bench = Bench(comm, machine, slice_s)
    spent: dict[tuple[str, bool], float] = {}
    growth = SIZES[1] / SIZES[0]

    def cell(name: str, nbytes: int, symmetric: bool, expected: float) -> None:
        if live.go(expected):
            live.say(f"{name}, {show_size(nbytes)}{', symmetric' * symmetric}")
            before = time.monotonic()
            bench.cell(name, nbytes, symmetric)
            spent[name, symmetric] = time.monotonic() - before

    for name, nbytes, symmetric in work:
        cell(name, nbytes, symmetric, growth * spent.get((name, symmetric), 0.0))
    for name, symmetric, nbytes in crossings(bench.decisions):
        cell(name, nbytes, symmetric, spent[name, symmetric])
    live.end(len(bench.times))
    transport, ranks = comm._session.place
    when = time.strftime("%Y-%m-%d %H:%M")
    taken = f"{when}, {time.monotonic() - start:.0f} s; {live.skipped} cells left out for time"
    taken += live.others()
    rules = tuple(rules_of(bench.decisions))
    return World(transport, ranks, machine, tuple(bench.times), rules, taken)


class _Live:
    """What is going on, shown by rank 0; and whether there is time for more, as rank 0 sees it."""

    def __init__(self, comm: Communicator, budget: float, start: float) -> None:
        self._comm, self._end, self._start = comm, start + budget, start
        self._live = sys.stderr.isatty() and comm.rank == 0
        self._reported, self.skipped = "", 0
        self._busy, self._own = _busy_s(), time.process_time()

    def go(self, expected: float) -> bool:
        """Tell, alike on all ranks, whether something that takes this long still fits."""
        fits = time.monotonic() + expected < self._end
        fits = bool(self._comm.broadcast(np.array([fits]))[0])
        self.skipped += not fits
        return fits

    def say(self, text: str) -> None:
        """Show what is being measured: on a terminal in place, elsewhere each size once."""
        left = max(0.0, self._end - time.monotonic())
        n = self._comm.world_size
        if self._live:
            sys.stderr.write(f"\r\x1b[K  {n} ranks: {text}  (at most {left:.0f} s left)")
            sys.stderr.flush()
        elif self._comm.rank == 0 and text.split(",")[1:2] != [self._reported]:
            self._reported = (text.split(",")[1:2] or [""])[0]
            print(f"{n} ranks: {text}, at most {left:.0f} s left", file=sys.stderr, flush=True)

    def others(self) -> str:
        """Say how much of the cores other processes used, if all ranks are on one host."""
        own = self._comm.all_reduce(np.array([time.process_time() - self._own]))[0]
        if len(self._comm._session.place[1]) > 1:
            return ""
        used = _busy_s() - self._busy - own
        cores = len(os.sched_getaffinity(0)) * (time.monotonic() - self._start)
        return f"; other processes used {max(0.0, used / cores):.0%} of the cores"

    def end(self, count: int) -> None:
        """Say that it is done."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
        if self._comm.rank == 0:
            spent = time.monotonic() - self._start
            print(f"{count} times measured in {spent:.1f} s", file=sys.stderr, flush=True)


def _busy_s() -> float:
    """Return the time that all processes of this host have computed."""
    ticks = read_text("/proc/stat").split("\n", 1)[0].split()[1:]
    idle = (3, 4)  # idle, and waiting for input
    busy = sum(int(t) for i, t in enumerate(ticks[:8]) if i not in idle)
    return busy / os.sysconf("SC_CLK_TCK")


def save(path: Path, world: World) -> None:
    """Put a world into the table of a file, which is replaced at once."""
    with _alone(path.resolve().parent):
        _save(path, world)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder, if it can be: what another one puts into a table there meanwhile is kept."""
    fd = -1
    with contextlib.suppress(OSError):  # no locks there; or no folder, of which `put` tells
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _save(path: Path, world: World) -> None:
    here, kept = fingerprint(), None
    try:
        kept = Tuning.parse(path.read_text(encoding="utf-8"))
        other = kept.differences(here)
        if other:
            print(f"what {path} said is dropped: it was measured with another {other}")
    except FileNotFoundError:
        pass
    except (ArgumentError, UnicodeDecodeError) as error:
        print(f"what {path} said is dropped: {error}")
    fits = kept is not None and kept.fingerprint == json.loads(json.dumps(here))
    made = (kept if fits else Tuning(here)).with_world(world)
    put(path, made.to_json())
    placements = f"{len(made.worlds)} placement{'s' * (len(made.worlds) != 1)}"
    print(f"written: {path}, which has now {placements} of ranks")


def report(world: World) -> None:
    """Print what was found."""
    print(f"{describe(*world.place)}: {world.taken}")
    print(f"  {_constants(world.machine)}")
    if not world.rules:
        print("  nothing is faster than the built-in choice beyond noise")
        return
    head = ("collective", "order", "arrays", "bytes", "algorithm", "time", "instead of", "time")
    print(table(head, [_row(rule) for rule in world.rules], right=(5, 7)))


def _constants(machine: Machine | Network) -> str:
    """Return the constants of the cost model as text: times, and speeds; *hidden* is too small."""
    values = {k: v for k, v in vars(machine).items() if isinstance(v, float)}
    rates = [name for name in values if name.endswith("beta") or name in ("gamma", "bus")]
    parts = []
    for name, value in values.items():
        text = f"1/({1e-9 / value:.3g} GB/s)" if name in rates else show_time(value)
        parts.append(f"{name} {text if value > 10 * LEAST else 'hidden'}")
    return ", ".join(parts)


def _row(rule: TunedRule) -> tuple[str, ...]:
    return (
        rule.collective,
        rule.order or "-",
        "symmetric" if rule.symmetric else "any, staged",
        f"{show_size(rule.min_bytes)} to {show_size(rule.max_bytes)}",
        rule.algorithm,
        show_time(rule.seconds),
        rule.default,
        show_time(rule.default_seconds),
    )

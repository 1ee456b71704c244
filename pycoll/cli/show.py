"""``pycoll show``: draw the schedule of an algorithm, or print its rounds or a rank's program."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from pycoll.algorithms import ALGORITHMS
from pycoll.cli.common.arguments import (
    ALGORITHM,
    PIPELINE,
    add_pipeline_sizes,
    check_drawing,
    is_own,
    lookup,
    put,
)
from pycoll.cli.explain import RULES_HEAD, rules_as_rows
from pycoll.cli.run import MAX_RANKS
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.runtime.selection.rules import RULES
from pycoll.runtime.selection.select import of_collective
from pycoll.schedule.ir import Algorithm, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.language.formula import evaluate, stated
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.compile import peer_plan, peer_plans
from pycoll.schedule.lowering.plan import Plan
from pycoll.schedule.pictures import as_text, drawn
from pycoll.schedule.stepped import stepped

_INTRODUCTION = """\
# Algorithms

Every algorithm is one function in `pycoll/algorithms/`, written without synchronisation.
`pycoll verify` proves it before it runs, `pycoll show NAME -n 8 -o picture.png` draws it, and
[architecture.md](architecture.md) says how it becomes a program.

- In the formulas n is the world size, p the largest power of two that is at most n, m the size of
  the full vector, and k the number of blocks of a pipeline.
- *Order* is the expression along which ranks are combined: `tree` is the in-order balanced tree,
  `rank` the serial loop, and `any` means that it depends on the chunk.
- *When* is who uses it: the selector, by a line of the table at the end, or only a call that names
  it with `algorithm=`.

This file is generated: `pycoll show --table > docs/algorithms.md`.
"""
_SELECTION = """\
## What the selector takes

The first line that fits a call and gives its reduction order decides, the same on every rank. Times
that `pycoll tune` has measured come first. `pycoll explain all_reduce --bytes 1M -n 8` explains one
call. *Symmetric* arrays are those of `comm.empty`.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show`` to the command line."""
    parser = subparsers.add_parser(
        "show", description="Draw the schedule of an algorithm; without -o, print its rounds."
    )
    add = parser.add_argument
    names = f"name, such as ring, {ALGORITHM}, pipeline:NAME; several by commas, for a page"
    add("algorithm", nargs="?", help=names)
    add("--collective", choices=sorted(COLLECTIVES), default="all_reduce")
    add("-n", type=int, default=8, help="number of ranks (default 8)")
    add("-o", "--output", type=Path, help="file for a picture: .png, .svg, .pdf, .html")
    add("--html", action="store_true", help="write NAME.html, a page that steps through the rounds")
    add("--text", action="store_true", help="print the rounds")
    add("--plan", type=int, metavar="RANK", help="print the program of a rank")
    add("--staged", action="store_true", help="with --plan: for arrays that peers cannot reach")
    param = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
    add("--param", **param, help="parameter of the algorithm, such as root=1 or k=8")
    add_pipeline_sizes(parser, "4", "8")
    add("--table", action="store_true", help="print the table of all algorithms, as Markdown")


def main(args: argparse.Namespace) -> int:
    """Draw or print what was asked for."""
    if args.table:
        print(algorithms_page(), end="")
        return 0
    if args.algorithm is None:
        known = ", ".join(a.name for a in of_collective(args.collective))
        raise ArgumentError(f"which algorithm? For {args.collective} there are {known}")
    if args.algorithm.startswith(PIPELINE):
        from pycoll.cli.common import pipelines  # which needs the engine

        return pipelines.show(args)
    names = args.algorithm.split(",")
    schedules = [_schedule(args, name) for name in names]
    if args.html and args.output is None:
        args.output = Path(f"{'_'.join(name.rpartition(':')[2] for name in names)}.html")
    if args.output is not None and args.output.suffix == ".html":
        put(args.output, stepped(schedules))
        print(f"wrote {args.output}: open it in a browser")
        return 0
    if len(names) > 1:
        raise ArgumentError("several algorithms fit on a page only: --html, or -o FILE.html")
    (schedule,) = schedules
    if args.plan is not None:
        if not 0 <= args.plan < args.n:
            raise ArgumentError(f"--plan is {args.plan}, expected a rank, 0 to {args.n - 1}")
        print(_plan(args, schedule).listing())
    if args.output is not None:
        check_drawing("--output")
        put(args.output, drawn(schedule, str(args.output)))
        print(f"drew {schedule} to {args.output}")
    if args.text or (args.plan is None and args.output is None):
        for line in as_text(schedule):  # of large worlds there are millions
            print(line)
    return 0


def _schedule(args: argparse.Namespace, name: str) -> Schedule:
    if args.n > MAX_RANKS:
        raise ArgumentError(f"-n is {args.n}, expected at most {MAX_RANKS} ranks")
    try:
        algorithm = lookup(name, args.collective)
    except ScheduleError as error:
        others = [a.collective for a in ALGORITHMS if a.name == name]
        hint = f"; --collective {' or '.join(others)} has it" if others else ""
        raise ArgumentError(f"{error}{hint}") from None
    schedule = algorithm.schedule(args.n, **dict(map(_parameter, args.param)))
    Promise.of(schedule)  # refuses roots and chunks that cannot be
    return schedule


def _plan(args: argparse.Namespace, schedule: Schedule) -> Plan:
    """Compile the program that would run."""
    if is_own(args.algorithm):  # may be written for all ranks only, as with `numpy.roll`
        return peer_plans(schedule, direct=not args.staged)[args.plan]
    return peer_plan(schedule, args.plan, direct=not args.staged)


def _parameter(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name:
            return name, int(value)
    raise ArgumentError(f"--param is {text!r}, expected a name and a number, such as root=1")


def algorithms_page() -> str:
    """Return docs/algorithms.md: all algorithms with cost and source, and the selector's table."""
    head = ("collective", "name", "rounds", "bytes per rank", "order", "source", "when")
    algorithms = [_row(a) for name in COLLECTIVES for a in of_collective(name)]
    rules = _markdown(RULES_HEAD, rules_as_rows())
    return "\n".join((_INTRODUCTION, _markdown(head, algorithms), _SELECTION, rules))


def _row(algorithm: Algorithm) -> tuple[str, ...]:
    text = stated(algorithm)
    return (
        algorithm.collective,
        f"`{algorithm.name}`",
        _formula(text.rounds),
        _formula(text.nbytes) + text.rest,
        algorithm.order or "-",
        text.source,
        _when(algorithm),
    )


def _formula(text: str) -> str:
    """Mark a formula as code; prose stays as it is."""
    bound, _, formula = text.rpartition("at most ")
    try:
        evaluate(formula, 4)
    except ScheduleError:
        return text
    return f"{bound}{'at most ' if formula != text else ''}`{formula}`"


def _when(algorithm: Algorithm) -> str:
    chosen = any(
        rule.collective == algorithm.collective and algorithm.name in rule.names for rule in RULES
    )
    return "selector" if chosen else "by name"


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )

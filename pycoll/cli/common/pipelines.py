"""``pycoll verify`` and ``pycoll show`` of pipeline schedules: ``pipeline:NAME``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from pycoll.cli.common.arguments import PIPELINE, check_drawing, is_own, of_file, put
from pycoll.cli.common.text import table
from pycoll.errors import ArgumentError
from pycoll.parallel.pipeline.picture import picture
from pycoll.parallel.pipeline.program import Schedule
from pycoll.parallel.pipeline.proof import Proof, prove
from pycoll.parallel.pipeline.registry import SCHEDULES, find
from pycoll.parallel.pipeline.timing import Timing, simulate
from pycoll.schedule.pictures import saved

_MOST_COLUMNS = 2000


def _chosen(text: str) -> list[Schedule]:
    name = text.removeprefix(PIPELINE)
    if name == "all":
        return list(SCHEDULES)
    if is_own(name):
        return [of_file(*name.partition(":")[::2], Schedule, "pipeline schedule")]
    return [find(name)]


def verify(args: argparse.Namespace, sizes: Callable[[str], list[int]]) -> int:
    """Prove schedules for all given numbers of stages and micro-batches, and print what they keep.

    Raises:
        ScheduleError: For the first that is wrong, naming stages and operations.
    """
    worlds = [(p, m) for p in sizes(args.stages) for m in sizes(args.micro_batches)]
    rows = []
    for schedule in _chosen(args.algorithm):
        able = [(p, m) for p, m in worlds if m >= schedule.least(p)]
        if not able:
            schedule.program(*worlds[-1])  # says which sizes it takes
        proofs = [prove(schedule.program(p, m)) for p, m in able]
        missing = len(worlds) - len(able)
        rows.append(_facts(proofs[-1]) | {"proven": len(proofs), "not defined": missing})
    head = list(rows[0])
    print(table(head, [[str(row[name]) for name in head] for row in rows]))
    if args.json:
        put(args.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _facts(proof: Proof) -> dict[str, Any]:
    """Describe the largest program that was proven."""
    program = proof.program
    return {
        "schedule": program.schedule.name,
        "stages": program.p,
        "micro-batches": program.m,
        "bubble": f"{simulate(program).bubble_fraction:.1%}",
        "live": f"{max(proof.live):g}",
        "versions": max(proof.versions),
        "sends of a stage": max(proof.transfers),
    }


def show(args: argparse.Namespace) -> int:
    """Draw a schedule over time, or print it: a row for each stage, a column for each unit."""
    schedule, *others = _chosen(args.algorithm)
    if others:
        raise ArgumentError("which pipeline schedule? pycoll show takes one at a time")
    p, m = _number("-p", args.stages), _number("-m", args.micro_batches)
    timing = simulate(prove(schedule.program(p, m)).program)
    if args.output is not None:
        check_drawing("--output")
        put(args.output, saved(picture(timing), str(args.output), dpi=150))
        print(f"drew {timing.program} to {args.output}")
    if args.text or args.output is None:
        for line in as_text(timing):
            print(line)
    return 0


def _number(option: str, text: str) -> int:
    if not text.isdecimal():
        raise ArgumentError(f"{option} is {text!r}, expected a number")
    return int(text)


def as_text(timing: Timing) -> Iterator[str]:
    """Yield a head, and for each stage what it does in each unit of time.

    Raises:
        ArgumentError: If the lines would be too long to read.
    """
    program = timing.program
    several = program.schedule.chunks > 1
    yield f"{program}: bubble {timing.bubble_fraction:.1%} of {timing.total:g} units"
    rows = [["."] * int(timing.total) for _ in timing.spans]
    for row, own in zip(rows, timing.spans, strict=True):
        for op, (start, _) in own.items():
            row[int(start)] = f"{op.kind}{op.micro}" + (f".{op.chunk}" if several else "")
    width = max(len(text) for row in rows for text in row)
    if (width + 1) * timing.total > _MOST_COLUMNS:
        raise ArgumentError(
            f"{program} takes {timing.total:g} units of time, too many to print; draw it with -o"
        )
    for stage, row in enumerate(rows):
        yield f"stage {stage}: " + " ".join(text.ljust(width) for text in row).rstrip()

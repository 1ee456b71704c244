"""``pycoll plan``: the fastest meshes for a training run that fit into memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pycoll.cli.common.arguments import check_writable, put, size
from pycoll.cli.common.text import show_time, table
from pycoll.cli.measure import plan_steps
from pycoll.cli.run import main_of_pycoll
from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.layouts import AXES, CHOICES, check_fixed
from pycoll.parallel.analysis.planner import Prediction, plan
from pycoll.parallel.analysis.workload import Speed, Workload, workload
from pycoll.parallel.precision import RECIPES
from pycoll.runtime.startup.mpi import under_launcher
from pycoll.schedule.cost.described import describe, per_second


def add_parser(subparsers: Any) -> None:
    """Add ``plan`` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Find the fastest meshes for training a GPT, by predicted time, that fit into "
        f"memory.\n\nnetworks, with their defaults:\n{describe()}",
    )
    add = parser.add_argument
    sizes = "gpt:layers=24,hidden=2048,heads=16,vocabulary=50304,sequence=2048, or a JSON file"
    add("--model", required=True, help=sizes)
    add("--ranks", type=int, required=True, help="number of ranks")
    add("--memory", type=size, required=True, help="bytes of each rank: 80G")
    add("--batch", type=int, required=True, help="sequences of a step, over all ranks")
    add("--network", metavar="KIND:NAME=VALUE,...", help="see above (rails)")
    add("--flops", help="operations per second that a rank achieves (140T)")
    host = "bytes per second to where states and activations can be offloaded: 25G (nowhere)"
    add("--host", metavar="SPEED", help=host)
    add("--precision", choices=sorted(RECIPES), default="bf16", help="recipe (bf16)")
    add("--top", type=int, default=5, help="how many meshes (5)")
    add("--fix", action="append", default=[], metavar="NAME=VALUE", help=f"of {', '.join(CHOICES)}")
    measure = "also train them here, on so many ranks; network and speed are measured if not given"
    add("--measure", action="store_true", help=measure)
    add("--json", type=Path, metavar="FILE", help="also write the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the meshes, fastest first."""
    if args.json is not None:
        check_writable("--json", args.json)
    check_fixed(dict(map(_chosen, args.fix)), _host(args) > 0)
    if args.measure:
        return _measure(args) if under_launcher() else main_of_pycoll(args.ranks, _words(args))
    work = workload(args.model)
    network = args.network or "rails"
    speed = Speed({1: per_second(args.flops or "140T")}, host_bytes=_host(args))
    found = _plan(args, network, speed)
    print(
        f"{work.parameters / 1e9:.3g} billion parameters, {args.batch} sequences of "
        f"{work.sequence} on {args.ranks} ranks, {network}, {args.precision}"
    )
    head = ["mesh", "zero", "recompute", "micro-batches", "schedule", "step", "tokens/s", "memory"]
    axes = [axis for axis in AXES[::-1] if any(each.sent[axis] for each in found)][::-1]
    head += ["bubble", *(f"sent by {axis}" for axis in axes), "than the first"]
    rows = [_row(each, work, args.batch, axes) for each in found]
    print(table(head, rows, right=range(5, 9 + len(axes))))
    best = found[0]
    arguments = "".join(f", {name}={value!r}" for name, value in best.layout.arguments.items())
    engine = "DataParallel" if best.layout.schedule is None else "Pipeline"
    print(f"the first: {engine}(model, loss, Mesh(comm, {_mesh(best)}){arguments})")
    if args.json is not None:
        facts = [asdict(each) | {"seconds": each.seconds, "memory": each.memory} for each in found]
        put(args.json, json.dumps(facts, indent=1) + "\n")
    return 0


def _plan(args: argparse.Namespace, network: str, flops: Speed) -> list[Prediction]:
    given: dict[str, Any] = {name: getattr(args, name) for name in ("memory", "batch", "top")}
    given |= {"network": network, "flops": flops, "precision": args.precision}
    return plan(workload(args.model), args.ranks, fixed=dict(map(_chosen, args.fix)), **given)


def _host(args: argparse.Namespace) -> float:
    return per_second(args.host) if args.host else 0.0


def _words(args: argparse.Namespace) -> list[str]:
    """Return the arguments with which each rank is started."""
    words = ["plan", "--measure"]
    names = "model", "ranks", "memory", "batch", "network", "flops", "host", "precision", "top"
    for name in names:
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words + [word for each in args.fix for word in ("--fix", each)]


def _measure(args: argparse.Namespace) -> int:
    """Predict and measure on the ranks of this job; rank 0 prints."""
    import pycoll

    work = workload(args.model)
    with pycoll.init() as comm:
        network = args.network or plan_steps.network(comm)
        if args.flops:
            speed = Speed({1: per_second(args.flops)}, host_bytes=_host(args))
        else:
            speed = plan_steps.speed(comm, work, args.batch, args.precision)
            speed = replace(speed, host_bytes=_host(args))
        rows = []
        for each in _plan(args, network, speed):
            found = plan_steps.measured(comm, work, each.layout, args.precision)
            rows.append(_row(each, work, args.batch, ())[:5] + plan_steps.row(each, found))
        if comm.rank == 0:
            speeds = ", ".join(f"{s / 1e9:.3g} G ({b})" for b, s in speed.flops.items())
            rest = f"{1e9 * speed.update_s:.3g} ns a parameter and step"
            print(f"{network}, of each of {args.ranks} ranks (sequences of a micro-batch):")
            print(f"{speeds} operations/s, and {rest}")
            head = ["mesh", "zero", "recompute", "micro-batches", "schedule", "predicted", "step"]
            head += ["off", "predicted", "peak of the ledger", "off"]
            print(table(head, rows, right=range(5, 11)))
    return 0


def _chosen(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(f"--fix is {text!r}, expected NAME=VALUE")
    if value.isdecimal():
        return name, int(value)
    return name, None if (name, value.lower()) == ("schedule", "none") else value


def _mesh(prediction: Prediction) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in prediction.layout.mesh.items() if size > 1)


def _row(prediction: Prediction, work: Workload, batch: int, axes: Sequence[str]) -> list[str]:
    layout, sent = prediction.layout, prediction.sent
    return [
        _mesh(prediction) or "one rank",
        str(layout.zero),
        layout.recompute + (f", offload {layout.offload}" if layout.offload != "none" else ""),
        f"{layout.micro_batches} of {layout.micro_batch}",
        layout.schedule or "-",
        show_time(prediction.seconds),
        f"{batch * work.sequence / prediction.seconds:,.0f}",
        f"{prediction.memory / 1e9:.1f} GB",
        f"{prediction.bubble:.1%}" if layout.schedule else "-",
        *(f"{sent[axis] / 1e9:.3g} GB" if sent[axis] else "-" for axis in axes),
        prediction.why or "-",
    ]

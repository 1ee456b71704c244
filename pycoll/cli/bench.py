"""``pycoll bench``: measure collectives, and check every size that is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pycoll.cli import run
from pycoll.cli.common.arguments import (
    ALGORITHM,
    OPS,
    ORDERS,
    at_least,
    check_reduction,
    check_writable,
    in_memory,
    is_own,
    lookup,
    one_of,
)
from pycoll.cli.common.machine import describe
from pycoll.cli.common.text import sized
from pycoll.cli.measure.bench_data import IN_PLACE, NAMES, Problem, check_op, element_type
from pycoll.cli.measure.bench_report import OsuTable, Table, check_plot, plot, write_json
from pycoll.cli.measure.bench_time import Row, Setup, measure
from pycoll.comm import Communicator
from pycoll.config import TRANSPORTS
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.runtime.selection.select import select
from pycoll.runtime.startup.mpi import under_launcher
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import DType, ReduceOp

# In the order in which a command is written down.
_WHAT: dict[str, dict[str, Any]] = {
    "--min": {"default": "8", "metavar": "B", "help": "smallest size of the full vector (8)"},
    "--max": {"default": "64M", "metavar": "B", "help": "largest size (64M)"},
    "--factor": {"default": 2, "type": int, "metavar": "F", "help": "from size to size (2)"},
    "--dtype": {"default": "float32", "metavar": "T", "help": "element type (float32)"},
    "--op": {"choices": OPS, "help": "reduction operation (sum)"},
    "--algorithm": {"metavar": "A", "help": f"name, {ALGORITHM}; by default the selector's choice"},
    "--order": {"choices": ORDERS, "help": "reduction order; by default that of the collective"},
    "--symmetric": {"action": "store_true", "help": "arrays in symmetric memory: no staging"},
    "--symmetric-input": {"action": "store_true", "help": "only the inputs, results elsewhere"},
    "--in-place": {"action": "store_true", "help": "measure only with the result in the input"},
    "--hot": {"action": "store_true", "help": "the same arrays in every call, so in the cache"},
    "--iters": {"type": int, "metavar": "N", "help": "calls for each number; by default for 0.2 s"},
    "--transport": {"choices": list(TRANSPORTS), "help": "mpi: messages, on one host too"},
    "--timeout": {"type": float, "metavar": "S", "help": "seconds a call may wait for its peers"},
}
_OUTPUT: dict[str, dict[str, Any]] = {
    "--format": {"default": "full", "choices": ["full", "osu"], "help": "columns (full)"},
    "--short": {"action": "store_true", "help": "the narrow form of the table"},
    "--json": {"metavar": "FILE", "help": "write all numbers, with machine, versions and commit"},
    "--plot": {"metavar": "FILE", "help": "draw time and bandwidth over size"},
}
ALL_FLAGS = _WHAT | _OUTPUT


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure collectives",
        description="Measure a collective over a range of sizes. Results are checked, element by "
        "element; the exit status is 1 if any was wrong. Sizes are those of the full vector.",
    )
    add, names = parser.add_argument, ", ".join(NAMES)
    add("collective", type=one_of(NAMES), metavar="collective", help=names)
    add("-n", type=int, metavar="N", help="start N ranks; leave it out under a launcher")
    for flag, spec in ALL_FLAGS.items():
        add(flag, **spec)


def main(args: argparse.Namespace) -> int:
    """Measure, or start the ranks that do."""
    sizes = sizes_of(args)
    element_type(args.dtype)
    check_op(args.op or "sum")
    _check_call(args, sizes)
    at_least("--iters", args.iters, 1)
    if args.timeout is not None and not args.timeout > 0:
        raise ArgumentError(f"--timeout is {args.timeout}, expected a number of seconds > 0")
    if args.in_place and args.collective not in IN_PLACE:
        raise ArgumentError(f"{args.collective} does not work in place")
    if args.plot and sizes == [0]:
        raise ArgumentError("--plot draws over sizes, and a barrier has none")
    if args.plot:
        check_plot(args.plot)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path:
            check_writable(option, path)
    if args.n is not None and under_launcher():
        raise ArgumentError("-n is for a machine; under a launcher its ranks are measured")
    if args.n is not None:
        return run.main_of_pycoll(args.n, ["bench", *arguments_of(args, ALL_FLAGS)])
    import pycoll

    with pycoll.init(timeout=args.timeout, transport=args.transport) as comm:
        return _measure_all(comm, args, sizes)


def sizes_of(args: argparse.Namespace) -> list[int]:
    """Return the sizes to measure, in bytes."""
    low, high = in_memory(args.min), in_memory(args.max)
    if args.collective == "barrier":
        return [0]
    if not 0 < low <= high:
        raise ArgumentError(f"--min {args.min} --max {args.max}: expected 0 < min <= max")
    at_least("--factor", args.factor, 2)
    sizes = [low]
    while sizes[-1] * args.factor <= high:
        sizes.append(sizes[-1] * args.factor)
    return sizes


def _check_call(args: argparse.Namespace, sizes: Sequence[int]) -> None:
    """Refuse what every rank would refuse, before there is any."""
    name, base = args.collective, COLLECTIVES.get(args.collective.removesuffix("_v"))
    dtype = DType[args.dtype.upper()] if base and base.reduces else None
    check_reduction(name, dtype is not None, args.dtype, args.op)
    if dtype is None and args.order:
        raise ArgumentError(f"--order {args.order} is for reductions; {name} reduces nothing")
    if args.symmetric_input and (args.symmetric or args.in_place):
        raise ArgumentError("--symmetric-input leaves results elsewhere: take one of the options")
    if args.algorithm is None:
        return
    if name not in COLLECTIVES:
        raise ArgumentError(f"--algorithm {args.algorithm}: for {name} there is no choice")
    try:
        algorithm = lookup(args.algorithm, name)
    except ScheduleError as error:
        raise ArgumentError(str(error)) from None
    for nbytes in sizes if args.n and args.n > 0 else ():
        call = {"dtype": dtype, "op": ReduceOp[(args.op or "sum").upper()], "algorithm": algorithm}
        memory = {"direct": args.symmetric, "input_only": args.symmetric_input}
        select(name, nbytes, args.n, order=args.order, **call, **memory)


def arguments_of(args: argparse.Namespace, flags: dict[str, dict[str, Any]]) -> list[str]:
    """Return the arguments of ``bench`` that give these values, without the number of ranks."""
    words = [args.collective]
    for flag, spec in flags.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is True:
            words.append(flag)
        elif value is not False and value != spec.get("default"):
            words += [flag, str(value)]
    return words


def _measure_all(comm: Communicator, args: argparse.Namespace, sizes: Sequence[int]) -> int:
    table = OsuTable() if args.format == "osu" else Table(args.short or None)
    table = table if comm.rank == 0 else None
    machine = describe()
    collective, *rest = arguments_of(args, _WHAT)
    command = " ".join(["pycoll bench", collective, "-n", str(comm.world_size), *rest])
    if table:
        table.heading([command, *_about(args, comm, machine)])
    named = args.algorithm and is_own(args.algorithm)
    algorithm = lookup(args.algorithm) if named else args.algorithm
    setup = Setup(args.order, algorithm, args.symmetric, args.symmetric_input, args.hot, args.iters)
    rows: list[Row] = []
    what = args.collective, element_type(args.dtype), args.op or "sum"
    problems = [Problem.of_size(*what, size, comm.world_size) for size in sizes]
    for problem in dict.fromkeys(problems):  # small sizes may round to the same one

        def say(text: str, size: int = problem.nbytes) -> None:
            if table:
                table.say(f"{sized(size)} bytes: {text}")

        either = problem.name in IN_PLACE and not args.symmetric_input
        places = [False] * (not args.in_place) + [True] * either
        found = [measure(comm, problem, setup, in_place, say) for in_place in places]
        if table:
            table.rows(found)
        rows += found
    if table:
        table.footing(rows)
        _save(args, comm.world_size, machine, command, rows)
    return int(any(row.wrong for row in rows))


def _about(args: argparse.Namespace, comm: Communicator, machine: dict[str, Any]) -> list[str]:
    n = comm.world_size
    use = "the same in every call" if args.hot else "used in turn"
    version = f"pycoll {machine['pycoll']}" + (f" ({machine['commit']})" * bool(machine["commit"]))
    return [
        f"{n} ranks, {machine['cores']} cores, {machine['cpu']}; {version}, {machine['folds']}",
        comm.transport,
        f"{args.dtype} arrays in {_memory(args)}, {use}",
    ]


def _memory(args: argparse.Namespace) -> str:
    inputs = args.symmetric or args.symmetric_input
    elsewhere = " (results elsewhere)" * args.symmetric_input
    return ("symmetric memory" if inputs else "ordinary memory") + elsewhere


def _save(
    args: argparse.Namespace, n: int, machine: dict[str, Any], command: str, rows: list[Row]
) -> None:
    if args.json:
        write_json(args.json, machine, command, rows)
    if args.plot:
        what = args.collective + (f" {args.op or 'sum'}" if rows[0].op != "none" else "")
        title = f"{what}: {n} ranks, {args.dtype}, {_memory(args)}"
        about = f"{machine['cores']} cores, {machine['cpu']}, pycoll {machine['pycoll']}"
        plot(args.plot, title, f"{about}  ·  {command}", rows)

"""``pycoll explain``: tell which algorithm a call uses, what it costs, and why not another."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from pycoll.cli.common.arguments import DTYPES, OPS, ORDERS, check_reduction, one_of, size
from pycoll.cli.common.text import show_size, show_time, table
from pycoll.cli.run import MAX_RANKS
from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.prepare import DIRECT_KINDS, reached
from pycoll.runtime.selection.candidates import Candidate, candidates
from pycoll.runtime.selection.measured_choices import read, table_path
from pycoll.runtime.selection.rules import ANY_N, ANY_SIZE, RULES
from pycoll.runtime.selection.select import Choice, select, working_dtype
from pycoll.runtime.selection.topology import Topology
from pycoll.runtime.selection.tuning_table import World
from pycoll.schedule.cost.network import Network
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.types import DType, Kind, ReduceOp

_WAYS = ("staged", "in place")  # by whether peers reach the arrays


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``explain`` to the command line."""
    parser = subparsers.add_parser(
        "explain",
        description="Tell which algorithm a call uses and why; without a collective, "
        "print the table that decides.",
    )
    add, known = parser.add_argument, sorted(COLLECTIVES)
    names = ", ".join(known)
    add("collective", nargs="?", type=one_of(known), metavar="collective", help=names)
    add("--bytes", type=size, default=1 << 20, help="size of the full vector: 8, 1K, 1M (default)")
    add("-n", type=int, default=2, help="number of ranks (default 2)")
    add("--dtype", choices=DTYPES, default="float32", help="for reductions")
    add("--op", choices=OPS, help="(sum)")
    add("--order", choices=ORDERS)
    add("--algorithm", help="the algorithm that the call names")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--symmetric", action="store_true", help="arrays made by comm.empty")
    elsewhere = "x made by comm.empty, the result elsewhere"
    memory.add_argument("--symmetric-input", action="store_true", help=elsewhere)
    memory.add_argument("--private", action="store_true", help="any other arrays (default)")
    add("--tuning", metavar="T", help="measured times: auto (default), off, or the path of a table")
    cores = "cores that the ranks may use together (all of this machine)"
    add("--cores", type=int, default=len(os.sched_getaffinity(0)), help=cores)
    add("--hosts", metavar="N,N", help="ranks per host, which send messages, instead of -n")


def main(args: argparse.Namespace) -> int:
    """Print the explanation."""
    if args.collective is None:
        for option in ("op", "order", "algorithm", "tuning", "hosts"):
            if getattr(args, option) is not None:
                raise ArgumentError(f"--{option} is for a call: name a collective before it")
        print(table(RULES_HEAD, rules_as_rows(), right=(1, 2)))
        return 0
    ranks = _hosts(args.hosts) if args.hosts else (args.n,)
    if not (min(ranks) >= 1 and sum(ranks) <= MAX_RANKS):
        given = f"--hosts is {args.hosts!r}" if args.hosts else f"-n is {args.n}"
        raise ArgumentError(f"{given}, expected 1 to {MAX_RANKS} ranks")
    if args.cores < 1:
        raise ArgumentError(f"--cores is {args.cores}, expected 1 or more")
    reduces = COLLECTIVES[args.collective].reduces
    check_reduction(args.collective, reduces, args.dtype, args.op)
    symmetric = args.symmetric or args.symmetric_input
    direct, input_only = reached(Kind[args.collective.upper()], symmetric, args.symmetric)
    world = _world(args.tuning, ranks, messages=args.hosts is not None)
    op, dtype, nbytes = ReduceOp[(args.op or "sum").upper()], None, args.bytes
    if reduces:
        given = DType[args.dtype.upper()]
        dtype = working_dtype(args.collective, sum(ranks), given, op, args.order)
        dtype = given if args.algorithm else dtype
        nbytes = nbytes * dtype.itemsize // given.itemsize
    choice = select(
        args.collective,
        nbytes,
        sum(ranks),
        order=args.order,
        dtype=dtype,
        op=op,
        direct=direct,
        input_only=input_only,
        algorithm=args.algorithm,
        messages=args.hosts is not None,
        one_host=len(ranks) == 1,
        crowded=not args.hosts and args.n > args.cores,
        machine=world.machine if world else Network(ranks_per_host=ranks) if args.hosts else None,
        world=world,
    )
    if nbytes != args.bytes:
        wide = dtype.name.lower()
        print(f"made of {args.dtype} in {wide}, {show_size(nbytes)}, and rounded at the end\n")
    print(explanation(choice, world))
    return 0


def _hosts(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise ArgumentError(f"--hosts is {text!r}, expected ranks per host such as 2,2")
    return tuple(int(part) for part in text.split(","))


def _world(wanted: str | None, ranks: tuple[int, ...], messages: bool) -> World | None:
    """Return what was measured with ranks in these places, or None."""
    config = Config.from_env()
    config = config if wanted is None else replace(config, tuning=wanted)
    try:
        path = table_path(config)
    except RuntimeError as error:  # ~name, and nobody has this name
        raise ArgumentError(f"tuning {config.tuning!r} cannot be used: {error}") from None
    asked = config.tuning != "auto"
    if path is None or not (asked or os.path.exists(path)):
        return None
    try:
        _, tuning = read(path)
    except ArgumentError as error:
        if asked:
            raise ArgumentError(f"{path} cannot be used: {error}") from None
        print(f"{path} is not used: {error}\n")
        return None
    fits = [
        world
        for world in tuning.worlds
        if world.ranks_per_host == ranks and (world.transport != "shared memory") == messages
    ]
    return fits[-1] if fits else None


def explanation(choice: Choice, world: World | None = None) -> str:
    """Say what was chosen and why, and list all candidates.

    `world` is what was measured in the places of these ranks, if anything.
    """
    request = choice.request
    direct = Kind[request.collective.upper()] in DIRECT_KINDS
    memory = "symmetric" if request.direct else "private" if direct else "any"
    arrays = "a symmetric input, private results" if request.input_only else f"{memory} arrays"
    order = f", order {choice.order}" if choice.order else ""
    dtype = f" of {request.dtype.name.lower()}" if request.dtype is not None else ""
    matters = any(rule.crowded for rule in RULES if rule.collective == request.collective)
    crowd = ", more ranks than cores" if request.crowded and matters else ""
    params = "".join(f", {k} = {v}" for k, v in choice.params.items())
    head = ("", "algorithm", "rounds", "per rank", "order", "memory", "predicted", "measured", "")
    return "\n".join(
        (
            f"{request.collective}, {show_size(request.nbytes)}{dtype} on {request.n} ranks, "
            f"{arrays}{order}{crowd}",
            "",
            f"  {choice.name}, {_WAYS[choice.direct]}{params}: "
            f"{show_time(choice.predicted_s)} predicted",
            f"  because {choice.reason}",
            *_two_levels(choice, world),
            "",
            table(head, [_row(c) for c in candidates(choice, world)], right=(2, 6, 7)),
            "",
            "per rank: what the busiest rank sends or receives, in full vectors",
            *_basis(choice, world),
        )
    )


def _two_levels(choice: Choice, world: World | None) -> tuple[str, ...]:
    """Say where a call goes through hosts first, which is nobody's algorithm by name."""
    request, machine = choice.request, choice.machine
    if choice.measured or not isinstance(machine, Network):
        return ()
    if world is not None and not world.transport.startswith("two levels"):
        return ()
    but = "  but unless it is named the call goes"
    found = world and world.by_itself(request.collective, request.nbytes, request.order)
    if found:
        return (f"{but} in two levels: {show_time(found.seconds)}",)
    if not Topology(tuple(machine.hosts(request.n).tolist()), 0).takes(choice):
        return ()
    return (f"{but} through hosts first; what that takes was not measured",)


def _basis(choice: Choice, world: World | None) -> tuple[str, ...]:
    """Say what the numbers are worth."""
    request, machine = choice.request, choice.machine
    if isinstance(machine, Network):
        basis = (
            f"hosts with {show_time(machine.far_alpha)} per message between them and links of "
            f"{1e-9 / machine.far_beta:.3g} GB/s"
        )
    else:
        basis = (
            f"a host with {show_time(machine.alpha)} per synchronisation, "
            f"{1e-9 / machine.beta:.0f} GB/s a rank and {1e-9 / machine.bus:.0f} GB/s together"
        )
    if world is None:
        return (f"predicted for {basis}; nothing was measured here: see `pycoll tune`",)
    times = (
        {}
        if request.input_only
        else world.measured(request.collective, request.nbytes, request.direct)
    )
    sizes = {show_size(time.nbytes) for time in times.values()}
    measured = f"measured at {sizes.pop()}" if sizes else "not measured near this size"
    return f"predicted for {basis}, as measured here", f"{measured}: {world.taken}"


def _row(candidate: Candidate) -> tuple[str, ...]:
    chosen = candidate.verdict == "chosen"
    defined = candidate.rounds > 0 or candidate.predicted_s < float("inf")
    return (
        "*" if chosen else "",
        candidate.name,
        str(candidate.rounds) if defined else "-",
        str(candidate.per_rank) if defined else "-",
        candidate.order or "-",
        _WAYS[candidate.direct] if defined else "-",
        show_time(candidate.predicted_s),
        "-" if candidate.measured_s is None else show_time(candidate.measured_s),
        candidate.verdict,
    )


RULES_HEAD = ("collective", "ranks", "bytes", "arrays", "algorithm", "because")


def rules_as_rows() -> list[tuple[str, ...]]:
    """Return the selector's table as text; the first line that fits a call decides."""
    return [
        (
            rule.collective,
            ("any" if rule.max_n == ANY_N else f"<= {rule.max_n}") + ", > cores" * rule.crowded,
            "any" if rule.max_bytes == ANY_SIZE else f"<= {show_size(rule.max_bytes)}",
            "symmetric" if rule.direct else "any, staged",
            " or ".join(rule.names),
            rule.why,
        )
        for rule in RULES
    ]

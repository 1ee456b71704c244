"""``pycoll verify``: prove algorithms for given world sizes, or try the prover on mutants."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from pycoll.algorithms import ALGORITHMS, closest
from pycoll.cli.common.arguments import (
    ALGORITHM,
    PIPELINE,
    add_pipeline_sizes,
    at_least,
    check_writable,
    is_own,
    lookup,
    put,
)
from pycoll.cli.common.text import table
from pycoll.cli.job.rank_main import die_with
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.proof.large import WHOLE, LargeProof, prove_large
from pycoll.schedule.proof.mutate import Verdict, mutate
from pycoll.schedule.proof.verify import Proof, prove

ALL_ROOTS = 8  # worlds up to this size are proven for every root
MOST_RANKS = 1 << 16
MUTANT_WORLDS = "2..5,8"
_SILENCE_S = 5.0  # the longest, where progress goes to a pipe or a file
Task = tuple[str, int]  # name for `lookup`; world size


def add_parser(subparsers: Any) -> None:
    """Add the arguments of ``pycoll verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="prove algorithms correct for given world sizes",
        description="Prove algorithms for given world sizes, or try the prover on mutants.",
    )
    parser.add_argument(
        "algorithm", nargs="?", help=f"name, collective/name, {ALGORITHM}, pipeline:NAME"
    )
    parser.add_argument("--all", action="store_true", help="every algorithm")
    sizes = f'world sizes, such as "8" or "1..64,96"; beyond {WHOLE} by symmetry, or by samples'
    parser.add_argument("-n", dest="worlds", help=sizes)
    add_pipeline_sizes(parser, "1..4,8", "1..16")
    parser.add_argument("--collective", choices=sorted(COLLECTIVES), help="only this collective")
    parser.add_argument("--mutate", action="store_true", help="count rejected mutants instead")
    parser.add_argument("--count", type=int, default=3, help="mutants per kind, schedule and mode")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="also write the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Prove what was asked for; return 1 if anything fails."""
    at_least("--jobs", args.jobs, 1)
    at_least("--count", args.count, 1)
    if args.json:
        check_writable("--json", args.json)
    if (args.algorithm or "").startswith(PIPELINE):
        from pycoll.cli.common import pipelines  # which needs the engine

        return pipelines.verify(args, parse_worlds)
    chosen = _choose(args)
    worlds = parse_worlds(args.worlds or (MUTANT_WORLDS if args.mutate else "1..64"))
    tasks = [(name, n) for n in reversed(worlds) for name in chosen if lookup(name).works_for(n)]
    if not tasks:
        sizes = ", ".join(map(str, worlds)) if len(worlds) < 9 else f"{worlds[0]}..{worlds[-1]}"
        raise ScheduleError(f"{', '.join(chosen)}: not defined for these numbers of ranks: {sizes}")
    return (_mutate if args.mutate else _prove)(args, tasks)


def parse_worlds(text: str) -> list[int]:
    """Read a list of world sizes, such as ``"1..8,16"``."""
    worlds: set[int] = set()
    try:
        for part in text.split(","):
            low, dots, high = part.partition("..")
            found = range(int(low), int(high if dots else low) + 1)
            if found and found[-1] > MOST_RANKS:
                raise ScheduleError(f"-n {text}: expected at most {MOST_RANKS} ranks")
            worlds.update(found or [0])  # one that ends before it begins is refused, too
    except ValueError:
        worlds.clear()
    if not worlds or min(worlds) < 1:
        raise ScheduleError(f'{text!r} is no list of world sizes; write "8", "1..64" or "1..8,16"')
    return sorted(worlds)


def _choose(args: argparse.Namespace) -> list[str]:
    """Return the names of what was asked for."""
    if args.algorithm and is_own(args.algorithm):
        return [args.algorithm]
    if not args.algorithm and not args.all and not args.collective:
        raise ScheduleError("name an algorithm, or give --collective or --all")
    collective, _, name = (args.algorithm or "").rpartition("/")
    chosen = [
        f"{a.collective}/{a.name}"
        for a in ALGORITHMS
        if name in ("", a.name) and {collective, args.collective} <= {a.collective, "", None}
    ]
    if not chosen and args.algorithm in {a.collective for a in ALGORITHMS}:
        told = f"--collective {args.algorithm} proves all of its algorithms"
        raise ScheduleError(f"{args.algorithm} is a collective; {told}")
    if not chosen:
        within = [a for a in ALGORITHMS if args.collective in (None, a.collective)]
        known = [f"{a.collective}/{a.name}" if collective else a.name for a in within]
        hint = closest(args.algorithm, list(dict.fromkeys(known)))
        raise ScheduleError(
            f"{args.collective or 'pycoll'} has no algorithm {args.algorithm!r}{hint}"
        )
    return chosen


def _params(algorithm: Algorithm, n: int) -> list[dict[str, int]]:
    """Every root, and of a pipeline the fewest blocks and the usual number; one if it is large."""
    if n > WHOLE:
        return [{"root": n - 1} if "root" in algorithm.params else {}]
    roots = range(n) if n <= ALL_ROOTS else (0, n // 2, n - 1)
    found = [{"root": root} for root in roots] if "root" in algorithm.params else [{}]
    if "k" in algorithm.params:
        found = [{**params, "k": k} for params in found for k in (1, algorithm.params["k"])]
    return found


# --- Proofs ---------------------------------------------------------------------------------------


def _facts(proof: Proof | LargeProof) -> dict[str, Any]:
    schedule = proof.schedule
    fields = ("rounds", "bytes_sent", "order", "roundings", "slots", "folds", "waits", "seconds")
    fields = tuple(name for name in ("how", *fields) if hasattr(proof, name))
    return {
        "how": "all plans",
        "collective": schedule.collective,
        "algorithm": schedule.algorithm.name,
        "n": schedule.n,
        "params": schedule.params,
        **{name: getattr(proof, name) for name in fields},
    }


def _prove_one(task: Task) -> tuple[Task, list[dict[str, Any]], str]:
    """Prove in another process: schedules hold functions, so only facts travel back."""
    algorithm, facts = lookup(task[0]), []
    try:
        for params in _params(algorithm, task[1]):
            schedule = algorithm.schedule(task[1], **params)
            facts.append(_facts((prove if task[1] <= WHOLE else prove_large)(schedule)))
    except ScheduleError as error:
        return task, facts, str(error)
    return task, facts, ""


def _prove(args: argparse.Namespace, tasks: list[Task]) -> int:
    started = time.perf_counter()
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in tasks}
    errors = []
    for task, found, error in _spread(_prove_one, tasks, args.jobs, "proven"):
        facts[task[0]] += found
        errors += [error] if error else []
    print(table(_HEAD, [_row(found) for found in facts.values() if found], right=range(3, 8)))
    for error in errors:
        print(f"FAILED {error}")
    seconds = time.perf_counter() - started
    sampled = sum(" of " in fact["how"] for found in facts.values() for fact in found)
    right = f"{len(tasks) - len(errors) - sampled} of {len(tasks)} proven"
    right += f", {sampled} right in a sample of chunks" if sampled else ""
    print(f"{right} in {seconds:.1f} s")
    if args.json:
        proofs = [fact for found in facts.values() for fact in found]
        document = {"proofs": proofs, "errors": errors, "seconds": seconds}
        put(args.json, json.dumps(document, indent=1))
    return 1 if errors else 0


_HEAD = "collective algorithm worlds rounds bytes/rank order roundings time proven".split()


def _row(facts: list[dict[str, Any]]) -> list[str]:
    """Return a line of the table; rounds, bytes and roundings are those of the largest world."""
    last = max(facts, key=lambda fact: fact["n"])
    worlds = sorted({fact["n"] for fact in facts})
    orders = {fact["order"] for fact in facts}
    return [
        last["collective"],
        last["algorithm"],
        _ranges(worlds),
        str(last["rounds"]),
        f"{last['bytes_sent']:.4g} m",
        (orders.pop() if len(orders) == 1 else "any") or "-",
        str(last["roundings"]) if last["order"] else "-",
        f"{sum(fact['seconds'] for fact in facts):.2f} s",
        ", ".join(dict.fromkeys(fact["how"] for fact in facts)),
    ]


def _ranges(worlds: list[int]) -> str:
    parts: list[list[int]] = []
    for n in worlds:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    if len(parts) > 3:
        return f"{worlds[0]}..{worlds[-1]}, {len(worlds)} of them"
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in parts)


# --- Mutants --------------------------------------------------------------------------------------


def _mutate_one(count: int, task: Task) -> tuple[Task, list[Verdict]]:
    name, n = task
    algorithm = lookup(name)
    params = {"root": n - 1} if "root" in algorithm.params else {}
    return task, list(mutate(algorithm.schedule(n, **params), count=count, seed=n))


def _mutate(args: argparse.Namespace, tasks: list[Task]) -> int:
    total, killed, reasons = Counter(), Counter(), Counter()
    holes = []
    for (name, n), verdicts in _spread(
        partial(_mutate_one, args.count), tasks, args.jobs, "mutated"
    ):
        for verdict in verdicts:
            total[verdict.operator] += 1
            killed[verdict.operator] += bool(verdict.error)
            if verdict.unexplained:
                holes.append(f"{name}, n={n}: {verdict}")
            elif not verdict.error:
                reasons[verdict.operator, verdict.reason] += 1
    print(f"{'mutation':36}{'rejected':>9}{'of':>7}")
    for operator in total:
        print(f"{operator:36}{killed[operator]:>9}{total[operator]:>7}")
        for (changed, reason), times in reasons.items():
            if changed == operator:
                print(f"    {times} accepted: {reason}")
    print(f"{killed.total()} of {total.total()} rejected, {reasons.total()} are still right")
    for hole in holes:
        print(f"ACCEPTED WITHOUT REASON {hole}")
    if args.json:
        rows = [[*key, times] for key, times in reasons.items()]
        found = {"total": total, "rejected": killed, "right": rows, "unexplained": holes}
        put(args.json, json.dumps(found, indent=1))
    return 1 if holes else 0


# --- Many processes -------------------------------------------------------------------------------


def _spread(work: Callable, tasks: list[Task], jobs: int, verb: str) -> Iterator[Any]:
    """Do the work in some processes, and show how far it is: in a line, or now and then in one."""
    live, told = sys.stderr.isatty(), time.monotonic()
    others = set(multiprocessing.active_children())
    forking = multiprocessing.get_context("fork")  # also from Python 3.14 on: nothing stays behind
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), forking, _begin, (os.getpid(),))
    results: list[Future] = []
    try:
        for task in tasks:
            results.append(pool.submit(work, task))
        for i, result in enumerate(as_completed(results), 1):
            found = result.result()
            progress = f"{i}/{len(tasks)} {verb}  " + "{}, n={}".format(*found[0])[:48].ljust(48)
            if live:
                print(f"\r{progress}", end="", file=sys.stderr)
            elif time.monotonic() - told >= _SILENCE_S:
                print(progress.rstrip(), file=sys.stderr, flush=True)
                told = time.monotonic()
            yield found
    except BrokenProcessPool:
        raise ScheduleError(_at_work(tasks, results, jobs)) from None
    finally:
        done = len(results) == len(tasks) and all(result.done() for result in results)
        if not done:  # Ctrl-C, or a mistake in one of them
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown()
        if live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def _begin(parent: int) -> None:
    """Leave Ctrl-C to the parent, which ends its workers; they end with it, however it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)


def _at_work(tasks: list[Task], results: list[Future], jobs: int) -> str:
    """Say what the processes were doing when one of them ended: the first tasks without result."""
    lost = [t for t, r in zip(tasks, results, strict=False) if not r.done() or r.exception()]
    names = "; ".join(f"{name}, n={n}" for name, n in lost[:jobs])
    return (
        f"a process that works on schedules was killed or ended itself; at work were: {names}. "
        "Was memory short? Try fewer --jobs"
    )

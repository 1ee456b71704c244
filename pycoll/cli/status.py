"""``pycoll status``: what the ranks of a running job do, and whom they wait for."""

from __future__ import annotations

import argparse
import json
import time

from pycoll.cli.common.arguments import at_least
from pycoll.cli.common.text import table
from pycoll.errors import ArgumentError
from pycoll.observe.causes import find_causes, headline
from pycoll.observe.hosts import RSH, ask, together
from pycoll.observe.look import look
from pycoll.observe.page import HEAD, RIGHT, lines
from pycoll.observe.shares import watch
from pycoll.observe.status import Status, compare

HANG_STATUS = 1
_PERIOD_S, _LOOK_S = 1.0, 0.5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``status`` to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="tell what the ranks of a running job do",
        description="Look at a job of this user on this host, from outside, without touching it. "
        "The first line names the rank that holds the others up, and why; the table has that rank "
        "first. Of a job on several hosts it sees the ranks of this host, and their connections; "
        "--hosts adds those of others.",
    )
    parser.add_argument("job", nargs="?", type=int, metavar="JOB", help=JOB)
    parser.add_argument("--key", type=lambda text: int(text, 16), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print all there is, as JSON")
    parser.add_argument(
        "--watch-hang",
        type=float,
        metavar="S",
        help="watch the job until it ends (exit status 0), or until a rank has waited S seconds "
        f"for another one or the job has failed (the report, and exit status {HANG_STATUS})",
    )
    add_hosts(parser)


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options for jobs on several hosts."""
    parser.add_argument(
        "--hosts",
        type=lambda text: text.split(","),
        default=[],
        metavar="HOST,HOST",
        help="also look at the job on these hosts, by pycoll of the same version in the same place",
    )
    parser.add_argument(
        "--rsh", default=RSH, metavar="CMD", help=f"with --hosts: the remote shell ({RSH!r})"
    )


def look_around(args: argparse.Namespace, number: int | None) -> Status:
    """Look at a job on this host, and on others at the same time."""
    before = look(number, key=args.key)
    asked = ask(before.groups[0].key, args.hosts, args.rsh)
    shares = watch(before, _LOOK_S)
    return together(compare(before, look(before.number), shares), args.hosts, asked)


JOB = "process of the launcher or of a rank; by default the only job"


def main(args: argparse.Namespace) -> int:
    """Print the status; return 1 if a hang was to be watched for, and was seen."""
    at_least("--watch-hang", args.watch_hang, 0)
    if args.watch_hang is None:
        _print(look_around(args, args.job), args.json)
        return 0
    seen = look_around(args, args.job)  # there must be a job
    while not _hangs(seen, args.watch_hang):
        time.sleep(_PERIOD_S)
        try:
            seen = look_around(args, seen.number)
        except ArgumentError:
            if _there(seen.number):  # another host does not answer
                raise
            return 0
    _print(seen, args.json)
    return HANG_STATUS


def _there(number: int) -> bool:
    """Whether a job is still there."""
    try:
        return bool(look(number, 0))
    except ArgumentError:
        return False


def _hangs(seen: Status, limit_s: float) -> bool:
    return any(finding.waited_s >= limit_s for finding in find_causes(seen) if finding.waited_s)


def _print(seen: Status, as_json: bool) -> None:
    if as_json:
        findings = find_causes(seen)
        found = {"headline": headline(seen, findings), "findings": [f.as_json() for f in findings]}
        print(json.dumps(found | seen.as_json(), indent=1))
        return
    above, rows, below = lines(seen)
    print("\n".join([*above, "", f"job {seen.number}: {seen.command}"]))
    print(table(HEAD, rows, RIGHT))
    print("\n".join(below), end="\n" if below else "")

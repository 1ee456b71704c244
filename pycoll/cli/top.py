"""``pycoll top``: the status of a running job, live in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from pycoll.cli.common.arguments import at_least
from pycoll.cli.status import JOB, add_hosts
from pycoll.errors import ArgumentError
from pycoll.observe.hosts import ask, together
from pycoll.observe.look import look
from pycoll.observe.page import HEAD, RIGHT, lines
from pycoll.observe.shares import watch
from pycoll.observe.status import Status, compare

_WIDE, _WHERE_WIDE = 130, ("pid", "calls", "core", "heap")  # characters, and columns that need them


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``top`` to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="watch the ranks of a running job",
        description="What `pycoll status` tells, live, until the job ends or Ctrl-C. It reads the "
        "memory of the job and writes nothing, so that it may be ended, or killed, at any time.",
    )
    parser.add_argument("job", nargs="?", type=int, metavar="JOB", help=JOB)
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument("--rounds", type=int, metavar="N", help="stop after so many pictures")
    add_hosts(parser)


def main(args: argparse.Namespace) -> int:
    """Show the status again and again."""
    at_least("--every", args.every, 0)
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        raise ArgumentError("pycoll top needs rich: pip install rich") from None
    before, shown = look(args.job), 0
    number = before.number
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=Console(), auto_refresh=False) as live,
    ):
        while args.rounds is None or shown < args.rounds:
            asked = ask(before.groups[0].key, args.hosts, args.rsh)
            shares = watch(before, max(args.every, 0.1))
            try:
                after = look(number)
                seen, console = compare(before, after, shares), live.console
                seen = together(seen, args.hosts, asked)
            except ArgumentError:
                if shown == 0:
                    raise
                break  # the job has ended
            live.update(picture(seen, console.height, console.width), refresh=True)
            before, shown = after, shown + 1
    return 0


def picture(seen: Status, height: int = 40, width: int = 160) -> Any:
    """Return a status as something that rich can show, on a terminal of so many characters."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    above, rows, below = lines(seen, max(4, height - 8))
    ill = not above[0].startswith("all ")
    table = Table(box=None, pad_edge=False)
    shown = [i for i, name in enumerate(HEAD) if width >= _WIDE or name not in _WHERE_WIDE]
    for i in shown:  # only the last one, the newest call, gets more lines if it has to
        right = "right" if i in RIGHT else "left"
        table.add_column(HEAD[i], justify=right, no_wrap=i < len(HEAD) - 1)
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown), style=_style(row[2]))
    title = Text(
        f"job {seen.number}: {seen.command}", style="dim", no_wrap=True, overflow="ellipsis"
    )
    head = Text(above[0], style="bold red" if ill else "bold green")
    more = [Text(line) for line in above[1:]]
    return Group(head, *more, title, table, *[Text(line, style="dim") for line in below])


def _style(state: str) -> str:
    bad = ("stopped", "gone", "left", "absent", "blocked")
    return "red" if state in bad else "yellow" if state == "waits" else ""

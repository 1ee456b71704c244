"""The command ``pycoll``: a table of subcommands, each in a module of its own.

A module of a subcommand has ``add_parser(subparsers)``, which adds its arguments, and
``main(args)``, which runs it and returns the exit status (None is 0). Only the module that was
chosen is imported.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from pycoll.config import VERSION
from pycoll.errors import CollError

COMMANDS = {
    "run": "start the ranks of a job on this host",
    "status": "tell what the ranks of a running job do",
    "top": "watch the ranks of a running job",
    "report": "tell what a trace or the dumps of a failure say",
    "verify": "prove algorithms correct for given world sizes",
    "show": "draw the schedule of an algorithm",
    "simulate": "predict how long collectives take on a network",
    "plan": "find the fastest mesh for a training run",
    "explain": "tell which algorithm a call uses, and why",
    "bench": "measure collectives",
    "tune": "measure, and let the times choose algorithms",
    "checkpoint": "show, verify or rewrite a checkpoint of a training run",
    "doctor": "check this installation and tell what is missing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: The arguments; those of this process when None.

    Returns:
        The status of the subcommand; 2 for a `CollError`, where memory or the disk for the output
        is full, or where the engine or a package that it needs cannot be loaded; 130 after Ctrl-C,
        141 if nobody reads the output.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in ("stdout", "stderr"):  # None where they were closed: then nobody reads
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        return _no_command(argv)
    try:
        module = importlib.import_module(f"pycoll.cli.{name}")
    except ImportError as error:
        print(f"pycoll {name}: {error}\n`pycoll doctor` tells what is missing", file=sys.stderr)
        return 2
    args = _parse(name, module, argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack a sign
    try:
        status = module.main(args) or 0
        sys.stdout.flush()
        return status
    except CollError as error:
        print(f"pycoll {name}: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"pycoll {name}: out of memory: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read has had enough
            return 141
        where = f" to {error.filename!r}" if error.filename else ""
        print(f"pycoll {name}: cannot write{where}: {error.strerror}", file=sys.stderr)
        return 2


def _parse(name: str, module: Any, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pycoll")
    subparsers = parser.add_subparsers()
    module.add_parser(subparsers)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = subparsers.choices[name]
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", command.format_help())
        given = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(given, options, n=1) if given.startswith("--") else []
        hint = f"; did you mean {close[0]}?" if close else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _no_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pycoll", description="Collectives that are proven before they run."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="command", dest="command")
    for name, summary in COMMANDS.items():
        subparsers.add_parser(name, help=summary)
    if argv and not argv[0].startswith("-"):
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        parser.error(f"there is no command {argv[0]!r}{hint} known: {', '.join(COMMANDS)}")
    args = parser.parse_args(argv)
    if args.version:
        print(f"pycoll {VERSION}")
        return 0
    parser.print_help(sys.stderr)
    return 2

"""``pycoll report``: what a trace, or the dumps of a failed job, say."""

from __future__ import annotations

import argparse
from pathlib import Path

from pycoll.cli.common.arguments import check_writable, put
from pycoll.cli.common.text import table
from pycoll.errors import ArgumentError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="tell what a trace or the dumps of a failure say",
        description="Read what `pycoll run --trace DIR` (or PYCOLL_TRACE=DIR) has written, or, "
        "after an error, PYCOLL_DUMP=DIR. The first line names the rank and the cause.",
    )
    parser.add_argument("folder", help="folder of a trace, or of dumps")
    parser.add_argument("other", nargs="?", help="a second trace, to compare with the first")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument(
        "--chrome", type=Path, metavar="FILE", help="also write a .json.gz that Perfetto opens"
    )
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="FOLDER",
        help="also write dumps as PyTorch's torch.distributed.flight_recorder.fr_trace reads them",
    )


def main(args: argparse.Namespace) -> int:
    """Print the report."""
    for option, path in (("--html", args.html), ("--chrome", args.chrome)):
        if path is not None:
            check_writable(option, path)
    from pycoll.observe.report.failure import explain, read_dumps

    dumps = read_dumps(args.folder)
    if dumps:
        if args.html or args.chrome or args.other:
            raise ArgumentError(f"{args.folder!r} holds dumps of a failure; options are for traces")
        print("\n".join(explain(dumps)))
        if args.torch is not None:
            from pycoll.observe.report import torch_flight

            print(f"\nwrote {torch_flight.write(dumps, args.torch)} files to {args.torch}")
        return 0
    if args.torch is not None:
        raise ArgumentError(f"--torch is for dumps of a failure, and {args.folder!r} holds none")
    _traces(args)
    return 0


def _traces(args: argparse.Namespace) -> None:
    from pycoll.observe.report import page, text
    from pycoll.observe.report.analysis import analyse
    from pycoll.observe.trace import chrome
    from pycoll.observe.trace.merged import merge

    seen = analyse(merge(args.folder))
    before = analyse(merge(args.other)) if args.other else None
    wrote = []
    if args.html is not None:
        put(args.html, page.render(seen, before))
        wrote.append(f"\nwrote {args.html}")
    if args.chrome is not None:
        nbytes = chrome.write(seen.trace, args.chrome)
        wrote.append(
            f"\nwrote {args.chrome} ({nbytes:,} bytes); open it at https://ui.perfetto.dev"
        )
    print("\n".join(text.above(seen)))
    shown = text.tables(seen)
    if before is not None:
        shown = {f"Changes, from {args.other} to {args.folder}": text.changes(before, seen)} | shown
    for title, (head, rows) in shown.items():
        print(f"\n{title}")
        print(table(head, rows, range(1, len(head))))
    print(*wrote, sep="\n", end="\n" if wrote else "")

"""Showing measurements: a table that grows line by line, JSON, and a picture."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycoll.cli.common.files import put
from pycoll.cli.measure.bench_time import Row

_WIDE = 160  # columns of the full table
_CLEAR = "\r\x1b[K"


class Column(NamedTuple):
    """Heading, unit, width, and how to show a row."""

    title: str
    unit: str
    width: int
    show: Callable[[Row], str]


def sized(nbytes: int) -> str:
    """Return a size as ``8``, ``64K`` or ``1M``, in full where it is no round number."""
    for shift, suffix in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >> shift and not nbytes % (1 << shift):
            return f"{nbytes >> shift}{suffix}"
    return str(nbytes)


def microseconds(value: float) -> str:
    """Return a time with about three digits that mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


_WHAT = (
    Column("size", "B", 11, lambda r: str(r.nbytes)),
    Column("count", "", 11, lambda r: str(r.count)),
    Column("type", "", 9, lambda r: r.dtype),
    Column("redop", "", 6, lambda r: r.op),
    Column("root", "", 5, lambda r: str(r.root)),
)
_SHORT = (
    Column("size", "B", 9, lambda r: sized(r.nbytes)),
    Column("place", "", 6, lambda r: "in" if r.in_place else "out"),
)
_RESULT = (
    Column("time", "us", 9, lambda r: microseconds(r.time_us)),
    Column("p99", "us", 9, lambda r: microseconds(r.p99_us)),
    Column("stream", "us", 9, lambda r: microseconds(r.stream_us)),
    Column("algbw", "GB/s", 7, lambda r: f"{r.algbw:.2f}"),
    Column("busbw", "GB/s", 7, lambda r: f"{r.busbw:.2f}"),
    Column("#wrong", "", 7, lambda r: str(r.wrong)),
)


class Table:
    """The columns of nccl-tests with p99 and the streaming cadence; live on a terminal.

    On a terminal too narrow for that, out of place and in place have lines of their own and what is
    the same in all lines is left out.
    """

    LEGEND = (
        "time, p99: slowest rank, one call at a time; algbw, busbw from time; stream: back to back"
    )

    def __init__(self, short: bool | None = None) -> None:
        """Choose a form.

        Args:
            short: Whether to use the narrow form; None is as the terminal requires.
        """
        self._live = sys.stderr.isatty()
        narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
        self._short = narrow if short is None else short

    def heading(self, lines: Sequence[str]) -> None:
        """Print what is true of all lines, and the names of the columns."""
        for line in (*lines, self.LEGEND):
            print(f"# {line}")
        if not self._short:
            what, group = (sum(c.width for c in columns) for columns in (_WHAT, _RESULT))
            print(f"#{'':{what - 1}}{'out of place':>{group}}{'in place':>{group}}")
        columns = self._columns()
        for cells, last in (
            ([c.title for c in columns], "schedule"),
            ([c.unit for c in columns], ""),
        ):
            print(f"#{_align(cells, columns)[1:]}  {last}".rstrip(), flush=True)

    def rows(self, rows: Sequence[Row]) -> None:
        """Print what was measured at one size: in the full form as one line."""
        self.say("")
        columns = self._columns()
        if self._short:
            lines = [[column.show(row) for column in columns] for row in rows]
        else:
            cells = [column.show(rows[0]) for column in _WHAT]
            for in_place in (False, True):
                found = [row for row in rows if row.in_place == in_place]
                cells += [column.show(found[0]) if found else "-" for column in _RESULT]
            lines = [cells]
        for cells, row in zip(lines, rows, strict=False):
            print(f"{_align(cells, columns)}  {row.schedule}", flush=True)

    def _columns(self) -> tuple[Column, ...]:
        return (*_SHORT, *_RESULT) if self._short else (*_WHAT, *_RESULT, *_RESULT)

    def say(self, text: str) -> None:
        """Show what is going on, on the line where the next row will be."""
        if self._live:
            sys.stderr.write(f"{_CLEAR}  {text}" if text else _CLEAR)
            sys.stderr.flush()

    def footing(self, rows: Sequence[Row]) -> None:
        """Print the verdict and the average."""
        wrong = sum(row.wrong for row in rows)
        print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        moved = [row.busbw for row in rows if row.nbytes]
        if moved:
            print(f"# Avg bus bandwidth    : {sum(moved) / len(moved):.4g} GB/s")


class OsuTable:
    """The columns of the OSU micro-benchmarks with ``-f``: one line for each size.

    Size is that of the message as they count it: the vector of an all-reduce or a broadcast, one
    rank's block otherwise.
    """

    LEGEND = "latency: of the slowest rank of each call, one call at a time; over the calls"

    def heading(self, lines: Sequence[str]) -> None:
        """Print what is true of all lines, and the names of the columns."""
        for line in (*lines, self.LEGEND):
            print(f"# {line}")
        titles = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations")
        print(f"{'# Size':<10}" + "".join(f"{title:>17}" for title in titles), flush=True)

    def rows(self, rows: Sequence[Row]) -> None:
        """Print what was measured at one size: out of place where both were."""
        row = rows[0]
        whole = row.collective in ("all_reduce", "broadcast", "reduce", "barrier")
        size = row.nbytes if whole else row.nbytes // row.ranks
        times = (row.mean_us, row.min_us, row.max_us)
        cells = [f"{value:>17.2f}" for value in times]
        print(f"{size:<10}" + "".join(cells) + f"{row.iters:>17}", flush=True)

    def say(self, text: str) -> None:
        """Show nothing: the output is for programs."""

    def footing(self, rows: Sequence[Row]) -> None:
        """Print the verdict."""
        wrong = sum(row.wrong for row in rows)
        print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")


def make_table(form: str, short: bool | None) -> Table | OsuTable:
    """Return a table in the form asked for, ``full`` or ``osu``."""
    return OsuTable() if form == "osu" else Table(short)


def _align(cells: Sequence[str], columns: Sequence[Column]) -> str:
    return "".join(f"{cell:>{c.width}}" for cell, c in zip(cells, columns, strict=True))


def write_json(path: str, machine: dict[str, Any], command: str, rows: Sequence[Row]) -> None:
    """Write everything to a file."""
    document = {"command": command, "machine": machine, "rows": [row.as_dict() for row in rows]}
    put(path, json.dumps(document, indent=1) + "\n")

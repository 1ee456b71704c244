"""Showing measurements: a table that grows line by line, JSON, and a picture."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll.cli.common.arguments import check_drawing, put
from pycoll.cli.common.text import sized
from pycoll.cli.measure.bench_time import Row
from pycoll.errors import ArgumentError
from pycoll.schedule.pictures import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 160  # columns of the full table
_CLEAR = "\r\x1b[K"


class Column(NamedTuple):
    """Heading, unit, width, and how to show a row."""

    title: str
    unit: str
    width: int
    show: Callable[[Row], str]


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
        """Choose the narrow form, the wide one, or (None) what the terminal requires."""
        self._live = sys.stderr.isatty()
        narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
        self._short = narrow if short is None else short

    def heading(self, lines: Sequence[str]) -> None:
        """Print what is true of all lines, and the names of the columns."""
        print(*(f"# {line}" for line in (*lines, self.LEGEND)), sep="\n")
        if not self._short:
            what, group = (sum(c.width for c in columns) for columns in (_WHAT, _RESULT))
            print(f"#{'':{what - 1}}{'out of place':>{group}}{'in place':>{group}}")
        columns = self._columns()
        titles, units = [c.title for c in columns], [c.unit for c in columns]
        print(f"#{_align(titles, columns)[1:]}  schedule")
        print(f"#{_align(units, columns)[1:]}".rstrip(), flush=True)

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
        _verdict(rows)
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
        print(*(f"# {line}" for line in (*lines, self.LEGEND)), sep="\n")
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
        _verdict(rows)


def _verdict(rows: Sequence[Row]) -> None:
    wrong = sum(row.wrong for row in rows)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")


def _align(cells: Sequence[str], columns: Sequence[Column]) -> str:
    return "".join(f" {cell:>{c.width - 1}}" for cell, c in zip(cells, columns, strict=True))


def write_json(path: str, machine: dict[str, Any], command: str, rows: Sequence[Row]) -> None:
    """Write everything to a file."""
    document = {"command": command, "machine": machine, "rows": [asdict(row) for row in rows]}
    put(path, json.dumps(document, indent=1) + "\n")


# --- Pictures -------------------------------------------------------------------------------------

_INK, _GREY, _FAINT = "#1f2933", "#52606d", "#e3e7ec"
_SERIES = ((False, "out of place", "#0072b2", "o"), (True, "in place", "#d55e00", "s"))


def check_plot(path: str) -> None:
    """Refuse early what can only fail at the end."""
    check_drawing("--plot")
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path!r}: its suffix has to be one of {', '.join(formats)}")
    trial = Figure(figsize=(1, 1))
    trial.text(0, 0, "text")
    saved(trial, path)


def plot(path: str, title: str, subtitle: str, rows: Sequence[Row]) -> None:
    """Write a picture of the rows, sizes ascending; the suffix of the path chooses the format."""
    from matplotlib.figure import Figure

    Path(path).resolve().parent.mkdir(parents=True, exist_ok=True)
    style: dict[str, Any] = {"color": _INK, "ha": "left", "x": 0.06}
    figure = Figure(figsize=(10.5, 4.9), dpi=150, facecolor="white")
    figure.suptitle(title, y=0.965, fontsize=14, fontweight="bold", **style)
    figure.text(0.06, 0.878, subtitle, fontsize=8.5, color=_GREY)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.12, wspace=0.14)
    for in_place, name, colour, marker in _SERIES:
        found = [row for row in rows if row.in_place == in_place]
        if not found:
            continue
        x = [row.nbytes for row in found]
        line: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "lw": 1.8}
        left.plot(x, [row.time_us for row in found], **line)
        p99 = [row.p99_us for row in found]
        left.fill_between(x, [row.time_us for row in found], p99, color=colour, alpha=0.13, lw=0)
        stream = {**line, "marker": "", "ls": (0, (4, 2)), "lw": 1.3}
        left.plot(x, [row.stream_us for row in found], **stream)
        right.plot(x, [row.busbw for row in found], label=name, **line)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda us, _: f"{us:g} µs" if us < 1e3 else f"{us / 1e3:g} ms")
    right.set_ylim(bottom=0)
    _finish(left, rows, "time of a call, slowest rank")
    _finish(right, rows, "bus bandwidth, GB/s")
    key: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": _INK}
    right.legend(loc="upper left", **key)
    left.legend(handles=_styles(), loc="upper left", **key)
    put(path, saved(figure, path))


def _finish(axes: Axes, rows: Sequence[Row], heading: str) -> None:
    sizes = sorted({row.nbytes for row in rows})
    axes.set_xscale("log", base=2)
    ticks = sizes[:: max(1, -(-len(sizes) // 8))]
    axes.set_xticks(ticks, [sized(size) for size in ticks], fontsize=8.5, color=_GREY)
    axes.minorticks_off()
    axes.set_title(heading, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("size of the vector (bytes)", fontsize=9, color=_GREY)
    axes.tick_params(axis="both", length=0, labelcolor=_GREY, labelsize=8.5)
    axes.grid(color=_FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _styles() -> list[Any]:
    """Say what the styles of the left panel mean; the colours are explained on the right."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=_GREY, marker="o", markersize=4, lw=1.8, label="one call at a time"),
        Patch(color=_GREY, alpha=0.2, lw=0, label="up to its 99th percentile"),
        Line2D([], [], color=_GREY, ls=(0, (4, 2)), lw=1.3, label="back to back"),
    ]

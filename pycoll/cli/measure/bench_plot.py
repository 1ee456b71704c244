"""A picture of measurements: time and bandwidth over size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.cli.common.files import check_drawing, put
from pycoll.cli.measure.bench_report import sized
from pycoll.cli.measure.bench_time import Row
from pycoll.errors import ArgumentError
from pycoll.schedule.pictures import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GREY, _FAINT = "#1f2933", "#52606d", "#e3e7ec"
_SERIES = ((False, "out of place", "#0072b2", "o"), (True, "in place", "#d55e00", "s"))


def check_available(path: str) -> None:
    """Refuse early what can only fail at the end.

    Raises:
        ArgumentError: matplotlib cannot be loaded, or cannot write such a file.
    """
    check_drawing("--plot")
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise ArgumentError(f"--plot {path!r}: its suffix has to be one of {', '.join(formats)}")
    trial = Figure(figsize=(1, 1))
    trial.text(0, 0, "text")
    saved(trial, path)


def draw(path: str, title: str, subtitle: str, rows: Sequence[Row]) -> None:
    """Write a picture of the rows.

    Args:
        path: File to write; its suffix chooses the format.
        title: Headline.
        subtitle: What it was measured on, in smaller print.
        rows: What was measured, sizes ascending.
    """
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

"""Pictures of a simulation: time over size, and how busy each link is in each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.simulate import Loads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _FAINT, _PAPER = "#1f2933", "#52606d", "#d5dae0", "#ffffff"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4fa3", "#8c6d46")
_MOST = 240  # rows and columns of a heat map; of more, each shows the busiest of several


def picture(
    title: str,
    times: Mapping[str, Sequence[tuple[int, float]]],
    fabric: Fabric,
    shown: str,
    loads: Loads,
) -> Figure:
    """Draw both.

    Args:
        title: What was simulated.
        times: Sizes in bytes and seconds of each algorithm.
        fabric: The network.
        shown: Name of the algorithm whose links are shown.
        loads: What its links carried.

    Raises:
        ArgumentError: If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(13, 5.6), layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    _draw_times(left, times)
    _draw_links(right, fabric, shown, loads)
    figure.suptitle(title, color=_INK, fontsize=11, x=0.01, ha="left")
    return figure


def _draw_times(axes: Axes, times: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for i, (name, points) in enumerate(times.items()):
        x, y = zip(*points, strict=True)
        colour, dashes = _COLOURS[i % len(_COLOURS)], ["-", "--", ":"][i // len(_COLOURS) % 3]
        axes.plot(x, y, color=colour, ls=dashes, marker="o", ms=3.5, lw=1.7, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: _size(size))
    axes.yaxis.set_major_formatter(lambda s, _: _time(s))
    axes.set_title("time until the last rank has finished", loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("size of the vector (bytes)", fontsize=9, color=_GREY)
    axes.grid(color=_FAINT, lw=0.8)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
    _finish(axes)


def _draw_links(axes: Axes, fabric: Fabric, shown: str, loads: Loads) -> None:
    """Rows are links, columns kinds of rounds in order; the colour is the time that one is busy."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    table = np.stack([busy[:-1] for _, busy in loads.rounds], axis=1)
    finite = table[np.isfinite(table)]
    table = np.where(np.isfinite(table), table, finite.max(initial=0.0))
    columns = -(-table.shape[1] // _MOST)
    groups, ticks, names = [], [], []
    for name, speeds in fabric.links().items():
        own = table[fabric.first[name] : fabric.first[name] + len(speeds)]
        own = _pooled(_pooled(own, -(-len(speeds) * len(fabric.first) // _MOST)).T, columns).T
        ticks.append(sum(map(len, groups)) + len(own) / 2 - 0.5)
        names.append(f"{name}[0..{len(speeds) - 1}]")
        groups.append(own)
    image = axes.imshow(
        np.concatenate(groups) * 1e6,
        aspect="auto",
        cmap="magma_r",
        interpolation="nearest",
        norm=PowerNorm(0.5, vmin=0),  # so that one long round does not hide all others
    )
    for edge in np.cumsum([len(g) for g in groups])[:-1]:
        axes.axhline(edge - 0.5, color=_GREY, lw=0.8)
    axes.set_yticks(ticks, names)
    kinds = loads.rounds[::columns]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(kinds) <= 8:
        labels = [f"{times:,} times" if times > 1 else str(i) for i, (times, _) in enumerate(kinds)]
        axes.set_xticks(range(len(kinds)), labels)
    total = sum(times for times, _ in loads.rounds)
    axes.set_xlabel(f"rounds of {shown}, {total:,} in all", fontsize=9, color=_GREY)
    axes.set_title("links: busy in a round, µs", loc="left", fontsize=10, color=_INK)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(length=0, labelcolor=_GREY, labelsize=8.5)
    bar.outline.set_visible(False)
    _finish(axes)


def _pooled(table: np.ndarray, size: int) -> np.ndarray:
    """Return the largest of each so many rows."""
    if size <= 1 or not len(table):
        return table
    return np.maximum.reduceat(table, np.arange(0, len(table), size), axis=0)


def _finish(axes: Axes) -> None:
    axes.tick_params(axis="both", length=0, labelcolor=_GREY, labelsize=8.5)
    axes.minorticks_off()
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _size(nbytes: float) -> str:
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g}{unit}"
    return f"{nbytes:g}"


def _time(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds * 1e9:g} ns"

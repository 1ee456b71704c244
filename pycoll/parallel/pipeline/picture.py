"""A program as a picture: time to the right, a row for each stage, what it holds below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycoll.errors import ArgumentError
from pycoll.parallel.pipeline.program import Op
from pycoll.parallel.pipeline.timing import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _PAPER = "#1f2933", "#52606d", "#ffffff"
_COLOURS = {"F": ("#0072b2", "#56b4e9"), "B": ("#d55e00", "#e69f00"), "W": ("#009e73", "#7fd1b5")}
_NAMES = {"F": "F: forward", "B": "B: gradient of the input", "W": "W: gradient of the parameters"}
_MOST = 4000  # boxes that a picture can show


def picture(timing: Timing) -> Figure:
    """Draw a program over time, and the activations that each stage holds.

    Args:
        timing: From `simulate`.

    Returns:
        The figure.

    Raises:
        ArgumentError: If matplotlib is missing, or there is too much to tell apart.
    """
    boxes = sum(map(len, timing.spans))
    if boxes > _MOST:
        raise ArgumentError(
            f"{timing.program} has {boxes} operations; a picture shows at most {_MOST}. Draw fewer "
            "stages or micro-batches: the pattern is the same"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    p = timing.program.p
    width = min(24.0, max(8.0, 0.27 * timing.total + 1.6))
    figure = Figure(figsize=(width, 1.7 + 0.78 * p), layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True, height_ratios=[p, max(1.0, 0.55 * p)])
    _draw_time(axes[0], timing, width)
    _draw_memory(axes[1], timing)
    bubble = f"bubble {timing.bubble_fraction:.1%} of {timing.total:g}"
    figure.suptitle(f"{timing.program}: {bubble}", color=_INK, fontsize=11)
    return figure


def _draw_time(ax: Axes, timing: Timing, width: float) -> None:
    from matplotlib.patches import Patch

    several = timing.program.schedule.chunks > 1
    inches = width / timing.total
    for stage, spans in enumerate(timing.spans):
        first = min(op.chunk for op in spans)
        for op, (start, end) in spans.items():
            colour = _COLOURS[op.kind][op.chunk != first]
            ax.barh(stage, end - start, 0.86, start, color=colour, edgecolor=_PAPER, linewidth=0.6)
            if inches * (end - start) > 0.17:
                text = str(op.micro)
                middle = (start + end) / 2
                ax.text(middle, stage, text, ha="center", va="center", color=_PAPER, fontsize=7)
    ax.set_ylim(timing.program.p - 0.5, -0.5)
    ax.set_yticks(range(timing.program.p), [f"stage {s}" for s in range(timing.program.p)])
    handles = [Patch(color=_COLOURS[kind][0], label=text) for kind, text in _NAMES.items()]
    if several:
        handles.append(Patch(color=_COLOURS["F"][1], label="paler: a later chunk of the stage"))
    ax.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    _plain(ax)


def _draw_memory(ax: Axes, timing: Timing) -> None:
    for stage, spans in enumerate(timing.spans):
        times, held = live_activations(timing, spans)
        shade = 0.15 + 0.6 * stage / max(1, timing.program.p - 1)
        ax.step(times, held, where="post", color=str(shade), linewidth=1.3, label=f"stage {stage}")
    ax.set_ylabel("live activations", fontsize=8)
    ax.set_xlabel("time, in forward passes of a chunk", fontsize=8)
    ax.set_ylim(bottom=0)
    ax.set_xlim(0, timing.total)
    if timing.program.p <= 8:
        ax.legend(fontsize=7, frameon=False, ncols=timing.program.p, loc="lower center")
    _plain(ax)


def live_activations(
    timing: Timing, spans: dict[Op, tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return the times at which a stage takes or frees an activation, and what it holds then."""
    chunks = timing.program.schedule.chunks
    steps = [(start, 1) for op, (start, _) in spans.items() if op.kind == "F"]
    steps += [(end, -1) for op, (_, end) in spans.items() if op.kind == "W"]
    times, held, now = [0.0], [0.0], 0
    for time, change in sorted(steps):
        now += change
        times.append(time)
        held.append(now / chunks)
    return times, held


def _plain(ax: Axes) -> None:
    ax.tick_params(colors=_GREY, labelsize=8, length=2)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(_GREY)

"""Who moves what when: drawn as a space-time diagram, and as text.

Ranks go down the page, rounds across it.

Every transfer is an arrow from the rank whose memory is read to the rank that reads it, or from the
rank that stores to the rank it stores to, in the colour of its chunk.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.cost import active, cost
from pycoll.schedule.ir import Buffer, Piece, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 32
_ROUND_INCHES = ((6, 1.9), (16, 1.35), (40, 0.75), (math.inf, 0.5))  # up to so many rounds
_INK, _GREY, _FAINT, _PAPER = "#1f2933", "#52606d", "#d5dae0", "#ffffff"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4fa3", "#8c6d46")

_DOT = {"ls": "", "marker": "o", "ms": 5, "mew": 1.1}
_DOTS = {  # by what a rank does in a round
    frozenset({"reduces"}): _DOT | {"mfc": _INK},
    frozenset({"copies"}): _DOT | {"mfc": _PAPER},
    frozenset({"reduces", "copies"}): _DOT | {"mfc": _INK, "mfcalt": _PAPER, "fillstyle": "left"},
}


def drawn(schedule: Schedule, path: str, dpi: int = 150) -> bytes:
    """Return what a file with a picture holds; its suffix tells the format: ``.png``, ``.svg``.

    Raises:
        ArgumentError: If matplotlib is missing, if there are too many ranks to tell apart, or if
            the format is not known.
    """
    if not Path(path).suffix:
        raise ArgumentError(f"cannot draw to {path}: its suffix tells the format, such as .png")
    return saved(picture(schedule), path, dpi=dpi, facecolor=_PAPER)


def saved(figure: Figure, path: str, **options: Any) -> bytes:
    """Return what a file with a figure holds, in the format that its suffix tells.

    Raises:
        ArgumentError: If the format is not known, or what matplotlib needs for it is missing:
            LaTeX, for one.
    """
    content = io.BytesIO()
    try:
        figure.savefig(content, format=Path(path).suffix[1:].lower(), **options)
    except (ValueError, RuntimeError, OSError) as error:
        raise ArgumentError(f"cannot draw to {path}: {error}") from None
    return content.getvalue()


def picture(schedule: Schedule) -> Figure:
    """Return the figure that `drawn` saves.

    Raises:
        ArgumentError: If matplotlib is missing, or there are too many ranks to tell apart.
    """
    if schedule.n > MAX_RANKS:
        raise ArgumentError(
            f"{schedule} has {schedule.n} ranks; a picture shows at most {MAX_RANKS}. "
            "Draw a smaller world: the pattern is the same"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(facecolor=_PAPER)
    FigureCanvasAgg(figure)
    _Picture(schedule, figure).paint()
    return figure


class _Picture:
    """Everything a figure shows of one schedule; x is time in rounds, y is the rank."""

    def __init__(self, schedule: Schedule, figure: Figure) -> None:
        self.schedule, self.figure = schedule, figure
        items = list(transfers(schedule))
        self.works: dict[tuple[int, int], set[str]] = {}  # (round, rank): what it does there
        for item in items:
            if isinstance(item, Mark):
                self.works.setdefault((item.round, item.rank), set()).add(item.does)
        self.arrows = [item for item in items if isinstance(item, Arrow)]
        self.rounds = max((item.round for item in items), default=0) + 1
        self.stores = {arrow.round for arrow in self.arrows if arrow.stored}
        self.reads = {arrow.round for arrow in self.arrows if not arrow.stored}
        self.colours = _palette(schedule.chunks)

    def paint(self) -> None:
        """Lay the page out, in inches, and fill it."""
        n, rounds = self.schedule.n, self.rounds
        step = next(inches for most, inches in _ROUND_INCHES if rounds <= most)
        step = max(step, 0.25 * n) if rounds <= 2 else step
        row = 0.62 if n <= 12 else 0.44
        left, right, top, bottom = 0.85, 0.45, 1.0, 1.05
        wide, high = max(step * rounds, 5.6), max(row * n, 1.2)
        width, height = wide + left + right, high + top + bottom
        self.figure.set_size_inches(width, height)
        axes = self.figure.add_axes(
            (left / width, bottom / height, wide / width, high / height), facecolor=_PAPER
        )
        self._grid(axes)
        self._arrows(axes)
        self._dots(axes)
        title, figures = caption(self.schedule)
        self.figure.text(left / width, 1 - 0.38 / height, title, size=13, weight="bold", color=_INK)
        self.figure.text(left / width, 1 - 0.66 / height, figures, size=9.5, color=_GREY)
        self._legend(left / width, height)

    def _spots(self, number: int) -> tuple[float, float, float]:
        """Times within a round: when data leaves its source, is folded, and arrives elsewhere."""
        reads, stores = number in self.reads, number in self.stores
        folded = 0.5 if reads and stores else 0.14 if stores else 0.86
        return number + 0.14, number + folded, number + 0.86

    def _grid(self, axes: Axes) -> None:
        n, rounds = self.schedule.n, self.rounds
        for rank in range(n):
            axes.plot([0, rounds], [rank, rank], color=_FAINT, lw=1, zorder=1)
        for number in range(0, rounds, 2):
            axes.axvspan(number, number + 1, color="#f5f7f9", lw=0, zorder=0)
        every = max(1, math.ceil(rounds / 40))
        axes.set_xlim(0, rounds)
        axes.set_ylim(n - 0.5, -0.5)
        shown = range(0, rounds, every)
        axes.set_xticks([number + 0.5 for number in shown], [f"{number}" for number in shown])
        axes.set_yticks(range(n), [f"rank {rank}" for rank in range(n)])
        axes.set_xlabel("round", size=9.5, color=_GREY, labelpad=3)
        axes.tick_params(length=0, labelsize=9 if n <= 16 else 8, colors=_INK)
        axes.spines[:].set_visible(False)

    def _arrows(self, axes: Axes) -> None:
        from matplotlib.patches import FancyArrowPatch

        crowd = len(self.arrows) / (self.rounds * self.schedule.n)
        opacity = min(1.0, max(0.4, 6.0 / crowd)) if crowd else 1.0
        for arrow in self.arrows:
            leaves, folded, arrives = self._spots(arrow.round)
            start, end = (folded, arrives) if arrow.stored else (leaves, folded)
            patch = FancyArrowPatch(
                (start, arrow.src),
                (end, arrow.dst),
                arrowstyle="-|>",
                mutation_scale=8,
                shrinkA=2,
                shrinkB=5 if not arrow.stored else 2,
                lw=1.1 + 0.45 * math.log2(arrow.count),
                linestyle=(0, (4, 1.6)) if arrow.stored else "-",
                color=self.colours[arrow.chunk],
                alpha=opacity,
                zorder=2,
            )
            axes.add_patch(patch)

    def _dots(self, axes: Axes) -> None:
        for (number, rank), does in self.works.items():
            style = _DOTS[frozenset(does)]
            axes.plot(self._spots(number)[1], rank, mec=_INK, zorder=3, **style)

    def _legend(self, left: float, height: float) -> None:
        """Explain marks and lines in one row, and the colours of the chunks in the row below."""
        from matplotlib.lines import Line2D

        found = (
            *(
                (does in self.works.values(), " and ".join(sorted(does, reverse=True)), dot)
                for does, dot in _DOTS.items()
            ),
            (bool(self.reads), "data read", {"lw": 1.2}),
            (bool(self.stores), "data stored", {"lw": 1.2, "ls": (0, (4, 1.6))}),
            (
                any(a.count > 1 for a in self.arrows),
                "several chunks, in the colour of the first",
                {"lw": 2.6},
            ),
        )
        shown = [
            (Line2D([], [], color=_INK, **look), label) for wanted, label, look in found if wanted
        ]
        style = {"frameon": False, "fontsize": 8.5, "labelcolor": _GREY, "borderpad": 0}
        style |= {"handletextpad": 0.5, "columnspacing": 1.4, "borderaxespad": 0}
        self.figure.legend(
            *zip(*shown, strict=True),
            loc="lower left",
            bbox_to_anchor=(left, 0.40 / height),
            ncols=len(shown),
            **style,
        )
        chunks = self.schedule.chunks
        every = max(1, math.ceil(chunks / 8))
        swatch = {"ls": "", "marker": "s", "ms": 7, "mew": 0}
        picked = list(range(0, chunks, every))
        self.figure.legend(
            [Line2D([], [], color=self.colours[c], **swatch) for c in picked],
            [f"chunk {c}" if c == 0 else f"{c}" for c in picked],
            loc="lower left",
            bbox_to_anchor=(left, 0.14 / height),
            ncols=len(picked),
            handlelength=1.0,
            **style,
        )


def _palette(chunks: int) -> list:
    """Colours of the chunks: distinct ones for a few, a smooth sequence for many."""
    if chunks <= len(_COLOURS):
        return list(_COLOURS)
    from matplotlib import colormaps

    # The yellow middle of the map would vanish on white, so every colour is darkened.
    shades = colormaps["turbo"](np.linspace(0.04, 0.96, chunks))[:, :3]
    light = shades @ (0.3, 0.59, 0.11)
    return list(shades * np.minimum(1, 0.55 / light)[:, None])


@dataclass(frozen=True)
class Arrow:
    """One transfer of a picture."""

    round: int  # round in which it happens
    # src, dst: rank whose memory it leaves, and rank whose memory it reaches
    src: int
    dst: int
    # chunk, count: first chunk, and number of consecutive chunks
    chunk: int
    count: int
    stored: bool  # the owner stores it on another rank; otherwise the owner reads it


@dataclass(frozen=True)
class Mark:
    """A rank at work in a round."""

    # round, rank: where
    round: int
    rank: int
    reduces: bool  # it combines several sources; otherwise it copies

    @property
    def does(self) -> str:
        """What it does, in a word."""
        return "reduces" if self.reduces else "copies"


def transfers(schedule: Schedule) -> Iterator[Arrow | Mark]:
    """Yield everything there is to draw, round by round."""
    n = schedule.n
    held: dict[tuple[int, int], int] = {}  # (rank, slot): chunk that a scratch slot holds
    for number, folds in enumerate(schedule.rounds(schedule.all_ranks())):
        stored: dict[tuple[int, int], int] = {}
        for f in folds:
            count = active(f, n)
            for owner in np.flatnonzero(count).tolist():
                places = [place_of(piece, owner, n) for piece in f.pieces]
                chunk = _chunk(places, held) % max(1, schedule.chunks)
                many = int(count[owner])
                yield Mark(number, owner, len(f.srcs) > 1)
                for i, (peer, buffer, slot) in enumerate(places):
                    is_store = i >= len(f.srcs)
                    if is_store and buffer == Buffer.TMP:
                        stored |= {(peer, slot + j): chunk + j for j in range(many)}
                    if peer != owner:
                        src, dst = (owner, peer) if is_store else (peer, owner)
                        yield Arrow(number, src, dst, chunk, many, is_store)
        held |= stored


def place_of(piece: Piece, owner: int, n: int) -> tuple[int, Buffer, int]:
    """Return rank, buffer and chunk of a piece of one owner's fold."""
    rank, chunk = (
        int(value[owner]) if np.ndim(value) else int(value) for value in (piece.rank, piece.chunk)
    )
    return rank % n, piece.buffer, chunk


def _chunk(places: list[tuple[int, Buffer, int]], held: dict[tuple[int, int], int]) -> int:
    """Chunk that a fold is about: of the user's arrays, or what a slot that it reads holds."""
    for _, buffer, chunk in reversed(places):
        if buffer != Buffer.TMP:
            return chunk
    return next((held[r, slot] for r, _, slot in places if (r, slot) in held), 0)


def caption(schedule: Schedule) -> tuple[str, str]:
    """Return the title of a picture and the line of figures under it."""
    spent = cost(schedule)
    order = schedule.algorithm.order
    extra = "".join(f", {k} = {v}" for k, v in schedule.params.items())
    title = f"{schedule.collective} · {schedule.algorithm.name} · n = {schedule.n}{extra}"
    figures = [
        _plural(spent.rounds, "round"),
        _plural(schedule.chunks, "chunk"),
        f"{_share(spent.per_rank)} per rank",
        f"order {order}" if order else "nothing is reduced",
    ]
    return title, "   |   ".join(figures)


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _share(part: Fraction) -> str:
    return f"{part} of the vector" if part.denominator > 1 else f"{part} x the vector"


def as_text(schedule: Schedule) -> Iterator[str]:
    """Yield the rounds as lines of text, one transfer a line."""
    yield from caption(schedule)
    current = -1
    for item in transfers(schedule):
        if item.round != current:
            current = item.round
            yield f"round {current}"
        if isinstance(item, Mark):
            yield f"  rank {item.rank} {item.does}"
            continue
        span = f"chunk {item.chunk}" if item.count == 1 else f"chunks {item.chunk}+{item.count}"
        verb = "stores to" if item.stored else "reads from"
        peer = item.dst if item.stored else item.src
        yield f"    {verb} rank {peer}  {span}"

"""Pictures: every transfer is in them, and nothing that is written overlaps."""

import sys

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ArgumentError
from pycoll.schedule.cost.cost import cost
from pycoll.schedule.pictures import (
    MAX_RANKS,
    Arrow,
    Mark,
    as_text,
    caption,
    drawn,
    picture,
    transfers,
)

EVERY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]


@pytest.mark.parametrize("algorithm", EVERY)
def test_arrows_carry_all_the_bytes(algorithm):
    schedule = algorithm.schedule(8 if algorithm.worlds(8) else 2)
    arrows = [item for item in transfers(schedule) if isinstance(item, Arrow)]
    moved = sum(arrow.count for arrow in arrows)
    assert moved == cost(schedule).sent.total * schedule.chunks
    assert all(arrow.src != arrow.dst for arrow in arrows)
    assert all(0 <= arrow.chunk < schedule.chunks for arrow in arrows)


def test_transfers_of_a_known_schedule():
    found = list(transfers(find("broadcast", "direct").schedule(3, root=1)))
    assert found == [
        Mark(0, 0, False),
        Arrow(0, 1, 0, 0, 1, False),
        Mark(0, 2, False),
        Arrow(0, 1, 2, 0, 1, False),
        Mark(1, 1, False),
    ]
    pushed = list(transfers(find("gather", "direct").schedule(2)))
    assert Arrow(0, 1, 0, 1, 1, True) in pushed


def test_text():
    text = "\n".join(as_text(find("all_reduce", "halving_doubling").schedule(4)))
    lines = text.splitlines()
    assert lines[0] == "all_reduce · halving_doubling · n = 4"
    assert "4 rounds" in lines[1]
    assert "3/2 of the vector per rank" in lines[1]
    assert [line for line in lines if line.startswith("round")] == [f"round {r}" for r in range(4)]
    assert "    reads from rank 1  chunks 0+2" in lines


def texts(figure):
    """Everything that is written on a figure, with its box in pixels."""
    renderer = figure.canvas.get_renderer()
    axes = figure.axes[0]
    written = [*figure.texts, axes.xaxis.label]
    written += [*axes.get_xticklabels(), *axes.get_yticklabels()]
    for legend in figure.legends:
        written += legend.get_texts()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in written]
    return [(text, box) for text, box in boxes if text]


def overlapping(boxes):
    """Pairs of texts whose boxes overlap."""
    return [
        (a, b)
        for i, (a, box) in enumerate(boxes)
        for b, other in boxes[i + 1 :]
        if box.overlaps(other)
    ]


@pytest.mark.parametrize(
    ("collective", "name", "n"),
    [
        ("all_reduce", "halving_doubling", 8),
        ("all_reduce", "one_shot", 2),
        ("all_reduce", "two_shot_push", 12),
        ("all_reduce", "ring", 9),
        ("all_reduce", "double_tree", 8),
        ("reduce_scatter", "halving", 32),
        ("broadcast", "direct", 1),
    ],
)
def test_nothing_written_overlaps_or_leaves_the_page(collective, name, n):
    figure = picture(find(collective, name).schedule(n))
    figure.canvas.draw()
    boxes = texts(figure)
    assert overlapping(boxes) == []
    page = figure.bbox
    assert all(page.x0 <= b.x0 and b.x1 <= page.x1 for _, b in boxes)
    assert all(page.y0 <= b.y0 and b.y1 <= page.y1 for _, b in boxes)
    assert {f"rank {r}" for r in range(n)} <= {text for text, _ in boxes}
    assert set(caption(find(collective, name).schedule(n))) <= {text for text, _ in boxes}


def test_a_picture_holds_every_arrow_and_its_colour():
    schedule = find("all_reduce", "ring").schedule(12)
    figure = picture(schedule)
    patches = figure.axes[0].patches
    arrows = [item for item in transfers(schedule) if isinstance(item, Arrow)]
    arrows_drawn = [p for p in patches if type(p).__name__ == "FancyArrowPatch"]
    assert len(arrows_drawn) == len(arrows) == 12 * 22
    colours = {
        arrow.chunk: p.get_edgecolor() for arrow, p in zip(arrows, arrows_drawn, strict=True)
    }
    assert len(set(colours.values())) == 12
    assert all(np.mean(colour[:3]) < 0.75 for colour in colours.values())  # it shows on white


def test_a_rank_that_reduces_and_copies_in_a_round_shows_both():
    schedule = find("all_reduce", "double_tree").schedule(8)
    does = {}
    for item in transfers(schedule):
        if isinstance(item, Mark):
            does.setdefault((item.round, item.rank), set()).add(item.does)
    figure = picture(schedule)
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    looks = {
        (int(dot.get_xdata()[0]), int(dot.get_ydata()[0])): (
            dot.get_fillstyle(),
            dot.get_markerfacecolor(),
        )
        for dot in dots
    }
    assert len(dots) == len(looks)  # none hides another
    assert looks.keys() == does.keys()
    assert len({(look, frozenset(does[place])) for place, look in looks.items()}) == 3
    assert "reduces and copies" in [text for text, _ in texts(figure)]


def test_formats():
    schedule = find("all_gather", "ring").schedule(3)
    assert drawn(schedule, "a.png").startswith(b"\x89PNG")
    assert b"<svg" in drawn(schedule, "a.svg")
    with pytest.raises(ArgumentError, match=r"a\.docx"):
        drawn(schedule, "a.docx")


def test_a_format_that_needs_what_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ArgumentError, match=r"cannot draw to a.pgf: .*latex.* not found"):
        drawn(find("all_reduce", "ring").schedule(2), "a.pgf")


def test_too_many_ranks_are_refused():
    with pytest.raises(ArgumentError, match="33 ranks"):
        picture(find("all_reduce", "ring").schedule(MAX_RANKS + 1))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match="pip install matplotlib"):
        picture(find("all_reduce", "ring").schedule(2))

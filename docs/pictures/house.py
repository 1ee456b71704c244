"""Draw the house: the folders of pycoll and csrc in layers, and which of them uses which.

``python docs/pictures/house.py`` writes house.svg beside this file (it needs matplotlib);
``--png FILE`` writes a PNG as well, and ``--check`` only tells whether house.svg is current.
Counts and arrows come from the files, their imports and their includes; only the place of a box is
written here. An arrow that follows from other arrows is left out. One that points upwards is red.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("house.svg")
INK, PALE, RED = "#1f2d3a", "#566573", "#c0392b"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class Box(NamedTuple):
    """One part of the house.

    Attributes:
        name: Its folder; of loose files what they are called here.
        text: What lives there.
        color: Fill.
        left, bottom, width, height: Where it stands, in inches.
        files: The loose files that it is made of.
    """

    name: str
    text: str
    color: str
    left: float
    bottom: float
    width: float
    height: float
    files: tuple[str, ...] = ()

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def top(self) -> float:
        """The upper edge."""
        return self.bottom + self.height

    @property
    def title(self) -> str:
        """What stands in its first line."""
        return "  ".join(self.files) if self.files else f"{self.name}/"


WORDS = ("errors.py", "types.py", "config.py")
LEFT, WIDE, HALF = 0.35, 4.95, 2.4
MIDDLE = LEFT + WIDE - HALF
CORE, DEVICE, NARROW = 6.05, 8.45, 1.95
BLUE, GREEN, ORANGE, YELLOW = "#d6e9f8", "#d8f0de", "#fde8cf", "#fbf1b8"
VIOLET, ROSE, GREY = "#e9def4", "#fbdedb", "#e9edf0"
BOXES = (
    Box("testing", "ranks inside a test", GREY, LEFT, 12.5, HALF, 0.62, ("testing.py",)),
    Box("pycoll/torch", "a backend of PyTorch", VIOLET, MIDDLE, 10.72, HALF, 1.6),
    Box("pycoll/cli", "the command", GREY, LEFT, 10.72, HALF, 1.3),
    Box("front", "init", YELLOW, LEFT, 8.6, 1.45, 0.85, ("__init__.py", "start.py")),
    Box("pycoll/parallel", "training", ROSE, 2.1, 8.6, LEFT + WIDE - 2.1, 1.96),
    Box("pycoll/comm", "the communicator", YELLOW, LEFT, 7.75, 2.95, 0.62),
    Box("kernels", "passes over vectors", GREEN, 3.45, 7.75, 1.85, 0.62, ("kernels.py",)),
    Box("pycoll/observe", "status, traces, reports", GREEN, LEFT, 6.15, HALF, 1.3),
    Box("pycoll/cuda", "arrays on CUDA devices", VIOLET, MIDDLE, 6.15, HALF, 1.3),
    Box("pycoll/runtime", "how it runs, on one rank", ORANGE, LEFT, 4.6, WIDE, 1.1),
    Box("pycoll/algorithms", "one idea a file", GREEN, LEFT, 2.8, WIDE, 0.85),
    Box("pycoll/schedule", "what moves, and its proof", BLUE, LEFT, 1.05, WIDE, 0.85),
    Box("words", "what every part shares", GREY, LEFT, -0.77, WIDE, 0.62, WORDS),
    Box("csrc/bindings", "pycoll._C", GREY, CORE, 5.61, NARROW, 0.95),
    Box("csrc/p2p", "send and recv", YELLOW, CORE, 4.77, NARROW, 0.62),
    Box("csrc/transports", "messages of plans", VIOLET, CORE, 3.26, NARROW, 1.29),
    Box("csrc/engine", "runs plans", ORANGE, CORE, 2.42, NARROW, 0.62),
    Box("csrc/memory", "shared memory", BLUE, CORE, 1.58, NARROW, 0.62),
    Box("csrc/kernels", "folds", GREEN, CORE, 0.07, NARROW, 1.29),
    Box("csrc/base", "errors, types", GREY, CORE, -0.77, NARROW, 0.62),
    Box("csrc/cuda", "the device library", VIOLET, DEVICE, 2.5, NARROW, 1.6),
)
CALL = (
    ("pycoll/comm/collectives.py", "the method: a signature, no body"),
    ("csrc/bindings/calls/fast_path.cpp", "a call like an earlier one goes straight to 7"),
    ("pycoll/runtime/sessions/session.py", "any other call: Session.call"),
    ("pycoll/runtime/calls/prepare.py", "checks arguments, finds their memory"),
    ("pycoll/runtime/selection/select.py", "chooses the algorithm"),
    ("pycoll/runtime/calls/plans.py", "compiles its plan, once, and binds bytes"),
    ("csrc/engine/engine.cpp", "runs the plan: FOLD, SIGNAL, WAIT"),
    ("csrc/kernels/fold/fold.cpp", "combines the bytes"),
)
"""The way of ``comm.all_reduce(x)`` in shared memory."""
PLACES = {box.name: box for box in BOXES}
LOADED = (("pycoll/cuda", "csrc/cuda"),)  # by ctypes, so there is no import to see
_LOOSE = {file: box.name for box in BOXES for file in box.files} | {
    "__main__.py": "pycoll/cli",
    "torch_autoload.py": "pycoll/torch",
}


def sources() -> Iterator[Path]:
    """Yield every source file, seen from the root."""
    for pattern in ("pycoll/**/*.py", "csrc/**/*.*"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT)


def part_of(path: Path) -> str:
    """Return the name of the box that a file is in."""
    name = _LOOSE.get(path.name, "") if len(path.parts) == 2 else "/".join(path.parts[:2])
    if name not in PLACES:
        sys.exit(f"house.py: {path} has no place in the house; give it one in BOXES")
    return name


def used_by(path: Path) -> Iterator[str]:
    """Yield the names of the boxes that a file imports or includes."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix != ".py":
        for name in INCLUDE.findall(text):
            found = [at / name for at in (Path("csrc"), path.parent) if (ROOT / at / name).exists()]
            yield from map(part_of, found[:1])
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (box_of_module(name) for name in names if name.split(".")[0] == "pycoll")


def box_of_module(name: str) -> str:
    """Return the name of the box in which a module, or something in it, is."""
    first = [*name.split("."), ""][1]
    if first == "_C":
        return "csrc/bindings"
    return f"pycoll/{first}" if f"pycoll/{first}" in PLACES else _LOOSE.get(f"{first}.py", "front")


def facts() -> tuple[dict[str, dict[str, int]], set[tuple[str, str]]]:
    """Return the files in each folder of each box, and who uses whom, as pairs of boxes."""
    counts: dict[str, dict[str, int]] = {box.name: {} for box in BOXES}
    uses = set()
    for path in sources():
        name = part_of(path)
        folder = path.parts[2] if len(path.parts) > 3 else ""
        counts[name][folder] = counts[name].get(folder, 0) + 1
        uses |= {(name, other) for other in used_by(path) if other != name}
    return counts, uses


def is_down(use: tuple[str, str]) -> bool:
    """Tell whether an arrow points at what is below, or across to another tower."""
    user, used = (PLACES[name] for name in use)
    return user.bottom > used.bottom or user.name.split("/")[0] != used.name.split("/")[0]


def reduced(uses: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out what follows from other arrows."""

    def reaches(start: str, end: str, without: tuple[str, str]) -> bool:
        after = {b for a, b in uses if a == start and (a, b) != without}
        return end in after or any(reaches(other, end, without) for other in after)

    return {use for use in uses if not reaches(*use, without=use)}


def path_of(user: Box, used: Box) -> list[tuple[float, float]]:
    """Return the corners of an arrow."""
    low, high = max(user.left, used.left), min(user.right, used.right)
    if low < high and not between(user, used):
        down = user.bottom > used.bottom
        ends = (user.bottom, used.top) if down else (user.top, used.bottom)
        return [((low + high) / 2 + (0.0 if down else 0.3), y) for y in ends]
    low, high = max(user.bottom, used.bottom), min(user.top, used.top)
    if low < high:  # beside each other
        ends = (user.right, used.left) if user.left < used.left else (user.left, used.right)
        return [(x, (low + high) / 2) for x in ends]
    if user.left < used.left:  # across, then down
        x, y = (used.left + used.right) / 2, (user.bottom + user.top) / 2
        return [(user.right, y), (x, y), (x, used.top)]
    margin = user.right + 0.07 + 0.04 * (sum(map(ord, user.name + used.name)) % 6)
    y, z = user.bottom + 0.5 * user.height, used.bottom + 0.35 * used.height
    return [(user.right, y), (margin, y), (margin, z), (used.right, z)]


def between(user: Box, used: Box) -> list[Box]:
    """Return the boxes that a straight arrow would cross."""
    x = (max(user.left, used.left) + min(user.right, used.right)) / 2
    low, high = sorted([(user.bottom, user.top), (used.bottom, used.top)])
    return [b for b in BOXES if b.left < x < b.right and low[1] <= b.bottom and b.top <= high[0]]


def draw(axes: Any, counts: dict[str, dict[str, int]], uses: set[tuple[str, str]]) -> None:
    """Draw boxes and arrows."""
    for box in BOXES:
        draw_box(axes, box, counts[box.name])
    down = {use for use in uses if is_down(use)}
    for use in sorted(reduced(down)):
        draw_arrow(axes, use, INK)
    for use in sorted(uses - down):
        draw_arrow(axes, use, RED)
    for use in LOADED:
        draw_arrow(axes, use, INK, dotted=True)
    axes.text(5.66, 5.48, "_C", family="monospace", size=9.5, color=INK, ha="center")
    axes.text(
        DEVICE + 0.9, 6.66, "libpycoll_cuda.so", family="monospace", size=9, color=INK, ha="right"
    )
    axes.text(LEFT, 13.35, "Python, pycoll/", size=12, weight="bold", color=INK)
    axes.text(CORE, 6.9, "C++, csrc/", size=12, weight="bold", color=INK)
    draw_call(axes)
    legend = "A → B: A uses B. What follows from other\narrows is not drawn. Numbers count files."
    legend += "\nRed points upwards: to be turned." if uses - down else ""
    axes.text(CORE - 0.35, 7.95, legend, size=10, color=PALE, va="top", linespacing=1.4)


def draw_call(axes: Any) -> None:
    """Write down the way of one call."""
    x, y = CORE - 0.35, 13.35
    axes.text(x, y, "The way of comm.all_reduce(x)", size=12, weight="bold", color=INK)
    for number, (path, text) in enumerate(CALL, 1):
        y -= 0.58
        color = PLACES[part_of(Path(path))].color
        dot = {"boxstyle": "circle,pad=0.28", "fc": color, "ec": INK, "lw": 0.8}
        axes.text(x + 0.12, y - 0.06, number, size=9.5, color=INK, ha="center", bbox=dot)
        axes.text(x + 0.42, y, path, family="monospace", size=9.5, color=INK)
        axes.text(x + 0.42, y - 0.22, text, size=10, color=PALE)


def draw_box(axes: Any, box: Box, counts: dict[str, int]) -> None:
    """Draw a box with its title, its text, and a chip for each folder in it."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.09"
    corner = (box.left, box.bottom)
    axes.add_patch(
        FancyBboxPatch(corner, box.width, box.height, style, fc=box.color, ec=INK, lw=1.0)
    )
    x, y = box.left + 0.12, box.top - 0.24
    stacked = len(box.files) == 2
    title = "\n".join(box.files) if stacked else box.title
    y -= 0.2 if stacked else 0
    axes.text(x, y, title, family="monospace", size=10.5, weight="bold", color=INK)
    if not box.files:
        total = str(sum(counts.values()))
        axes.text(box.right - 0.12, y, total, size=10.5, color=INK, ha="right")
    wide = box.width > 4 and not box.files
    at = (box.right - 0.5, y) if wide else (x, y - 0.22)
    axes.text(*at, box.text, size=10, color=PALE, ha="right" if wide else "left")
    x, y = box.left + 0.12, y - (0.42 if wide else 0.62)
    for folder, count in sorted(counts.items()):
        if not folder:
            continue
        width = 0.19 + 0.077 * len(f"{folder} {count}")
        if x + width > box.right - 0.05:
            x, y = box.left + 0.12, y - 0.31
        if y < box.bottom:
            sys.exit(f"house.py: the folders of {box.name} do not fit into its box; make it higher")
        chip = FancyBboxPatch((x, y), width, 0.24, style, fc="white", ec=PALE, lw=0.6)
        axes.add_patch(chip)
        label = f"{folder} {count}"
        axes.text(
            x + width / 2, y + 0.075, label, family="monospace", size=8.7, color=INK, ha="center"
        )
        x += width + 0.08


def draw_arrow(axes: Any, use: tuple[str, str], color: str, dotted: bool = False) -> None:
    """Draw an arrow from a box to one that it uses."""
    *corners, last = path_of(*(PLACES[name] for name in use))
    style = {"color": color, "lw": 1.3, "ls": (0, (1, 1.6)) if dotted else "-"}
    if len(corners) > 1:
        axes.plot(*zip(*corners, strict=True), **style, solid_capstyle="butt")
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.45", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=last, xytext=corners[-1], arrowprops=arrow | style)


def described(counts: dict[str, dict[str, int]], uses: set[tuple[str, str]]) -> str:
    """Return what the picture shows, in words; it stands in the SVG, and --check reads it."""
    boxes = (
        f"{name}: {', '.join(f'{f or name} {n}' for f, n in sorted(found.items()))}"
        for name, found in counts.items()
    )
    return "; ".join([*boxes, *(f"{a} uses {b}" for a, b in sorted(uses))])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--png", metavar="FILE", help="write a PNG, too")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    args = parser.parse_args()
    counts, uses = facts()
    text = described(counts, uses)
    if args.check:
        if not PICTURE.exists() or text not in PICTURE.read_text(encoding="utf-8"):
            sys.exit("house.svg is not what the sources say: run docs/pictures/house.py")
        return
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "house", "font.family": "DejaVu Sans"})
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(10.75, 14.35))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10.75), ylim=(-0.95, 13.7), aspect="equal")
    axes.axis("off")
    draw(axes, counts, uses)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": text}, facecolor="white")
    if args.png:
        figure.savefig(args.png, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()

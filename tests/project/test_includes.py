"""Includes in csrc go one way: no folder uses one above it, and no two headers need each other."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ORDER = ["base", "memory", "kernels", "engine", "p2p", "transports", "bindings"]
OF_CUDA = ("cuda/", "base/", "engine/plan.h", "engine/bind.h", "kernels/optim/")
SUFFIXES = {".h", ".cpp", ".inl", ".cu"}
FILES = [str(p.relative_to(CSRC)) for p in sorted(CSRC.rglob("*")) if p.suffix in SUFFIXES]


def includes(path):
    """Return the files of csrc that a file includes."""
    text = (CSRC / path).read_text(encoding="utf-8")
    return re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)


def test_there_are_files():
    assert {"engine/engine.h", "cuda/host/group.h"} <= set(FILES)


@pytest.mark.parametrize("path", FILES)
def test_a_file_includes_nothing_above_it(path):
    folder = path.split("/")[0]
    if folder == "cuda":
        wrong = [name for name in includes(path) if not name.startswith(OF_CUDA)]
    else:
        lower = ORDER[: ORDER.index(folder) + 1]
        wrong = [name for name in includes(path) if name.split("/")[0] not in lower]
    assert wrong == []


def test_no_circles():
    list(TopologicalSorter({path: includes(path) for path in FILES}).static_order())

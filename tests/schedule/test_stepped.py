"""The page that steps through a schedule: it ends with what the collective promises."""

import json
import re

import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ArgumentError
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.stepped import described, stepped

EVERY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]
N = 4


def expected(kind, rank, chunk):
    """Return the chunk and the ranks that a collective promises at a place, or None for nothing."""
    at_root = not kind.out_at_root or rank == 0
    mine = kind.out_layout != "own" or rank == chunk
    if not at_root or not mine or (kind.reduces and not kind.sources(rank, N)):
        return None
    if kind.reduces:
        return [chunk, list(range(kind.sources(rank, N)))]
    if kind.transposes:
        return [rank, [chunk]]
    return [chunk, [0 if kind.in_at_root else chunk]]


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_last_cells_are_what_the_collective_promises(algorithm):
    schedule = algorithm.schedule(N)
    page, kind = described(schedule), COLLECTIVES[schedule.collective]
    share = max(1, schedule.chunks // N)  # chunks of a block of a rank
    blocks = kind.out_layout == "own" or kind.in_layout == "own" or kind.transposes
    for rank, cells in enumerate(page["cells"][-1]):
        for chunk, cell in enumerate(cells[: schedule.chunks]):
            if kind.transposes:
                wanted = [rank * share + chunk % share, [chunk // share]]
            elif blocks:
                wanted = expected(kind, rank, chunk // share)
                wanted = wanted and [chunk, wanted[1]]
            else:
                wanted = expected(kind, rank, chunk)
            if wanted is not None:
                assert cell == wanted, (rank, chunk)
    assert page["cells"][0] != page["cells"][-1]
    assert len(page["arrows"]) == len(page["cells"])


def test_what_moved_is_seen():
    page = described(find("broadcast", "direct").schedule(3))
    assert page["cells"][0] == [[[0, [0]]], [None], [None]]
    assert page["arrows"][1] == [[0, 1, 0, 1], [0, 2, 0, 1]]


def test_a_page_holds_several():
    names = ("ring", "halving_doubling")
    page = stepped([find("all_reduce", name).schedule(N) for name in names])
    data = json.loads(re.search(r"^const all = (.*);$", page, re.MULTILINE)[1])
    assert [one["title"].split(" · ")[1] for one in data] == list(names)
    assert "<title>ring beside halving_doubling</title>" in page


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(ArgumentError, match="64 ranks and 64 chunks; a page shows at most 32"):
        stepped([find("all_reduce", "ring").schedule(64)])

"""Checks of all chunks: what the whole proof refuses, they refuse; forms of orders."""

import numpy as np
import pytest

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, algorithm, at, fold
from pycoll.schedule.proof.columns import check_columns
from pycoll.schedule.proof.forms import form, lines, trees
from pycoll.schedule.proof.verify import prove


@algorithm("all_reduce", chunks=1, slots=1)
def into_input(rank, n):
    yield fold([at(i, IN) for i in range(n)], to=at(rank, TMP), where=rank == 0)
    yield fold(at(0, TMP), to=[at(rank, OUT), at(rank, IN)])


@algorithm("all_reduce", chunks=1)
def too_late(rank, n):
    yield fold([at(i, IN) for i in range(n)], to=at(rank, OUT), where=rank == 0)
    yield fold([at(i, IN) for i in range(n)], to=at(rank, OUT), where=rank == 1)
    yield fold(at(0, OUT), to=at(rank, OUT), where=rank > 1)


@algorithm("all_reduce")
def all_at_once(rank, n):
    yield fold([at(i, IN, 0) for i in range(n)], to=at(rank, OUT, 0), count=n)


@algorithm("reduce", chunks=1, root=0)
def without_place(rank, n, root):
    yield fold([at(i, IN) for i in range(n)], to=at(1, OUT), where=rank == root)
    yield fold(at(1, OUT), to=at(rank, OUT), where=rank == root)


@algorithm("all_reduce", chunks=2, in_place=False)
def elsewhere(rank, n):
    yield fold([at(i, IN, 1) for i in range(n)], to=at(rank, OUT, 0), where=rank == 0)
    yield fold(at(0, OUT, 0), to=at(rank, OUT, 1))
    yield fold([at(i, IN, 0) for i in range(n)], to=at(rank, OUT, 0))


@algorithm("all_reduce", chunks=1, in_place=False)
def twice(rank, n):
    yield fold([at(i, IN) for i in range(n)], to=[at(rank, OUT), at(rank, OUT)])


@algorithm("all_reduce", chunks=64, order="rank", in_place=False)
def last_backwards(rank, n):
    """Declares an order that the chunks from 40 on have not."""
    yield [
        fold([at(i, IN, 0) for i in range(n)], to=at(rank, OUT, 0), count=40),
        fold([at(n - 1 - i, IN, 40) for i in range(n)], to=at(rank, OUT, 40), count=24),
    ]


@algorithm("scan", chunks=1, order="tree", in_place=False)
def long_ones_in_line(rank, n):
    yield [
        fold([at(i, IN) for i in range(r + 1)], to=at(rank, OUT), where=rank == r, tree=r < 20)
        for r in range(n)
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (into_input, r"rank 0 stores in in\[0:0\], but inputs are never written"),
        (too_late, r"rank 1 reads in\[0:0\], which in place is overwritten by then"),
        (all_at_once, r"in place: round 0: one fold writes out\[0:0\], and another one"),
        (without_place, r"stores in out\[1:0\], which the rank does not hold"),
        (elsewhere, r"stores in out\[0:0\], where another chunk belongs"),
        (twice, r"one fold writes out\[0:0\], and does so twice"),
        (last_backwards, "declares the order 'rank', but has not"),
        (long_ones_in_line, "declares the order 'tree', but has not"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_the_whole_proof_refuses(wrong, text):
    schedule = wrong.schedule(24)
    with pytest.raises(ScheduleError):
        prove(schedule)
    with pytest.raises(ScheduleError, match=text):
        check_columns(schedule)


def test_an_empty_round_is_none():
    @algorithm("all_reduce", chunks=1, in_place=False)
    def pause(rank, n):
        yield []
        yield fold([at(i, IN) for i in range(n)], to=at(rank, OUT))

    assert check_columns(pause.schedule(5)).rounds == 2


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 37])
def test_forms_of_all_numbers_of_inputs(n):
    leaves = np.random.default_rng(n).integers(0, 1 << 63, (n, 3), np.uint64)
    for function, tree in ((lines, False), (trees, True)):
        found = np.concatenate([values for _, values in function(leaves)])
        want = np.stack([form(leaves[: k + 1], tree) for k in range(n)])
        assert np.array_equal(found, want)

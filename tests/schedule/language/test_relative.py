"""Relative schedules: what was found once holds for every rank."""

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, TMP, at, fold, in_turn, together
from schedule.assemble import schedule_of

RELATIVE = [a for a in ALGORITHMS if a.schedule(8).relative is not None]
WORLDS = 1, 2, 3, 4, 7, 8


def test_which_are_relative():
    names = {f"{a.collective}/{a.name}" for a in RELATIVE}
    assert {"all_reduce/ring", "all_reduce/two_shot_pull", "all_to_all/bruck"} < names
    assert not {"all_reduce/halving_doubling", "broadcast/ring", "reduce/binomial"} & names


@pytest.mark.parametrize("entry", RELATIVE, ids=lambda a: f"{a.collective}/{a.name}")
def test_the_folds_of_every_rank(entry):
    for n in WORLDS:
        schedule = entry.schedule(n)
        lines = schedule.relative
        if lines is None:  # one rank may have a form of its own
            continue
        for rank in range(n):
            folds = [(i, f) for i, folds in enumerate(schedule.rounds(rank)) for f in folds]
            assert lines.round.tolist() == [i for i, _ in folds]
            assert lines.tree.tolist() == [f.tree for _, f in folds]
            assert lines.count.tolist() == [f.count if f.where else 0 for _, f in folds]
            arity = np.stack([lines.nsrc, lines.ndst], axis=1).tolist()
            assert arity == [[len(f.srcs), len(f.dsts)] for _, f in folds]
            pieces = [p for _, f in folds for p in f.pieces]
            assert (lines.rank + rank * lines.moves).tolist() == [p.rank for p in pieces]
            assert (lines.chunk + rank * lines.moves_chunk).tolist() == [p.chunk for p in pieces]
            assert lines.buffer.tolist() == [p.buffer for p in pieces]


@pytest.mark.parametrize(
    "asks",
    [
        lambda rank: rank == 0,
        lambda rank: rank != 0,
        lambda rank: rank % 2,
        lambda rank: rank < 2,
        lambda rank: bool(rank),
        lambda rank: np.minimum(rank, 1),
        lambda rank: np.array(rank) * 0,
        lambda rank: {rank: 1},
        lambda rank: [0, 1, 2][rank],
    ],
)
def test_who_asks_for_its_rank_is_not(asks):
    def rounds(rank, n):
        asks(rank)
        yield fold(at(rank, IN), to=at(rank, OUT))

    assert schedule_of("all_reduce", rounds, 3, chunks=1).relative is None


def test_scratch_memory_does_not_come_around():
    def rounds(rank, n):
        yield fold(at(rank, IN), to=at(rank, TMP, rank))

    assert schedule_of("all_reduce", rounds, 3, chunks=3, slots=3).relative is None


def test_steps_are_rounds_or_one():
    def make(step):
        return fold(at(0, IN, step), to=at(0, OUT, step))

    for steps, rounds in ((together, [4]), (in_turn, [1] * 4)):
        schedule = schedule_of("all_reduce", lambda rank, n, s=steps: iter([s(range(4), make)]), 2)
        assert [len(folds) for folds in schedule.rounds(1)] == rounds
    nothing = schedule_of("all_reduce", lambda rank, n: iter([together(range(0), make)]), 2)
    assert list(nothing.rounds(0)) == []


def test_a_step_that_is_no_fold():
    schedule = schedule_of(
        "all_reduce", lambda rank, n: iter([in_turn(range(2), lambda step: step)]), 2
    )
    with pytest.raises(ScheduleError, match="step 0 is 0, expected a fold"):
        list(schedule.rounds(0))


def test_what_is_told_of_whole_schedules_is_the_same_for_vectors():
    """`one_hop` and `reduces_at_once` read relative lines where there are any."""
    for entry in RELATIVE:
        for n in (2, 5):
            known, other = entry.schedule(n), entry.schedule(n)
            other.__dict__["relative"] = None
            assert known.one_hop == other.one_hop, (entry.name, n)
            assert known.reduces_at_once == other.reduces_at_once, (entry.name, n)
    assert find("all_reduce", "one_shot").schedule(5).reduces_at_once

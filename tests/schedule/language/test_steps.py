"""Steps in which only some ranks take part."""

import numpy as np
import pytest

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import IN, OUT, algorithm, at, fold, in_turn
from pycoll.schedule.lowering.compile import peer_plan, peer_plans
from pycoll.schedule.lowering.table import build_table, remote_buffers


def windows(rank):
    """Windows that begin before the first step, end behind the last, or are empty."""
    return 3 * rank - 4, 3 * rank - 1 - 9 * (rank == 2)


@algorithm("all_reduce", "windowed", chunks=1, in_place=False)
def windowed(rank, n):
    yield fold(at(rank, IN), to=at(rank, OUT))

    def add(step):
        own, other = at(rank, OUT), at(rank + step, IN)
        both = fold([own, other], to=own, where=step % 2 == 0)
        return [both, fold(other, to=own, where=step % 2 == 1)]

    yield in_turn(range(2, 9), add, during=windows(rank))
    yield fold(at(rank + 1, IN), to=at(rank, OUT))


@algorithm("all_reduce", "masked", chunks=1, in_place=False)
def masked(rank, n):
    yield fold(at(rank, IN), to=at(rank, OUT))
    first, last = windows(rank)
    for step in range(2, 9):
        acts = (first <= step) & (step < last)
        own, other = at(rank, OUT), at(rank + step, IN)
        both = fold([own, other], to=own, where=acts & (step % 2 == 0))
        yield [both, fold(other, to=own, where=acts & (step % 2 == 1))]
    yield fold(at(rank + 1, IN), to=at(rank, OUT))


@pytest.mark.parametrize("direct", [True, False])
def test_windows_are_masks(direct):
    """In the plans of all, and in those that only look at the ranks that take part."""
    for n in (1, 2, 3, 5):
        expected = peer_plans(masked.schedule(n), direct=direct)
        found = peer_plans(windowed.schedule(n), direct=direct)
        for rank, plan in enumerate(expected):
            for other in (found[rank], peer_plan(windowed.schedule(n), rank, direct=direct)):
                assert np.array_equal(plan.code, other.code), (n, rank)
                assert np.array_equal(plan.operands, other.operands), (n, rank)
    assert remote_buffers(windowed.schedule(5)) == remote_buffers(masked.schedule(5))


def test_rounds_and_blocks_are_the_same():
    schedule, ranks = windowed.schedule(5), np.arange(5)
    rounds = list(schedule.rounds(ranks))
    assert [len(folds) for folds in rounds] == [1] + [2] * 7 + [1]
    blocks = list(schedule.blocks(ranks))
    assert [block.rounds for block in blocks] == [1, 7, 1]
    acting = {(int(s) + 1, int(r)) for s, r in zip(blocks[1].round, blocks[1].column, strict=True)}
    masks = {
        (number, int(rank))
        for number, folds in enumerate(rounds[:-1])
        for f in folds[1:]
        for rank in ranks[np.broadcast_to(f.where | folds[0].where, 5)]
    }
    assert acting == masks
    assert 2 not in blocks[1].column


def test_bad_steps_are_refused():
    with pytest.raises(ScheduleError, match="one after the other"):
        in_turn(range(0, 9, 2), lambda step: fold(at(0, IN), to=at(0, OUT)), during=(0, 1))

    @algorithm("all_reduce", "nothing", chunks=1)
    def nothing(rank, n):
        yield in_turn(range(3), lambda step: step, during=(rank, rank + 1))

    for ask in (peer_plans, lambda s, direct: peer_plan(s, 0, direct=direct), build_table):
        options = {} if ask is build_table else {"direct": True}
        with pytest.raises(ScheduleError, match=r"in place of a fold or a list of folds"):
            ask(nothing.schedule(2), **options)

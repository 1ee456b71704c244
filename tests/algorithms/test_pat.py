"""PAT: what it costs in rounds, messages and memory."""

import math

import pytest

from pycoll.algorithms import find
from pycoll.errors import ScheduleError
from pycoll.schedule.proof.verify import prove


def rounds(collective, n, trees):
    return sum(1 for _ in find(collective, "pat").schedule(n, trees=trees).rounds(0))


@pytest.mark.parametrize("n", [2, 5, 16, 31, 64])
@pytest.mark.parametrize("trees", [1, 2, 8])
def test_proven_for_any_number_of_trees(n, trees):
    for collective in ("all_gather", "reduce_scatter"):
        prove(find(collective, "pat").schedule(n, trees=trees))


def test_one_tree_at_a_time_keeps_less_than_log2_n_partial_sums():
    pat = find("reduce_scatter", "pat")
    assert all(pat.schedule(n).slots <= max(0, math.ceil(math.log2(n)) - 1) for n in range(2, 1025))
    assert pat.schedule(1024).slots == 9


def test_many_trees_take_few_rounds():
    assert rounds("all_gather", 64, 64) == 1 + 6  # the last one keeps the own block
    assert rounds("all_gather", 64, 1) == 1 + 63
    assert rounds("reduce_scatter", 64, 64) == 6
    assert rounds("reduce_scatter", 64, 1) == 32


def test_a_message_holds_a_block_of_each_tree():
    schedule = find("all_gather", "pat").schedule(64, trees=4)
    assert max(len(folds) for folds in schedule.rounds(0)) == 4


@pytest.mark.parametrize("trees", [0, 3])
def test_trees_are_a_power_of_two(trees):
    with pytest.raises(ScheduleError, match=f"trees={trees}"):
        list(find("all_gather", "pat").schedule(8, trees=trees).rounds(0))

"""Predictions for messages: by hand for a few schedules, and monotonous in what there is to do."""

import pytest

from pycoll.algorithms import find
from pycoll.schedule.cost.network import Network

NET = Network(
    alpha=1.0,
    beta=0.01,
    far_alpha=10.0,
    far_beta=0.1,
    sigma=0.5,
    gamma=0.001,
    call=100.0,
    ranks_per_host=(2, 2),
)


def test_a_ring_over_two_hosts():
    schedule = find("all_gather", "ring").schedule(4)
    # Three rounds; in each both links carry one block of 10 bytes each way.
    assert NET.predict(schedule, 40) == pytest.approx(100 + 3 * (10 + 0.1 * 10))


def test_a_ring_inside_a_host():
    inside = Network(**{**vars(NET), "ranks_per_host": (4,)})
    schedule = find("all_gather", "ring").schedule(4)
    # A block out and one in at the same time; one message each way.
    assert inside.predict(schedule, 40) == pytest.approx(100 + 3 * (1 + 0.01 * 10))


def test_a_link_is_shared_by_the_ranks_of_its_host():
    schedule = find("all_to_all", "direct").schedule(4)
    # Each of two ranks sends two blocks of 10 bytes to the other host.
    alone = Network(**{**vars(NET), "ranks_per_host": (1, 1, 1, 1)})
    assert NET.predict(schedule, 40) == pytest.approx(100 + 10 + 0.1 * 40)
    assert alone.predict(schedule, 40) == pytest.approx(100 + 10 + 0.1 * 30)


def test_folds_count():
    schedule = find("all_reduce", "one_shot").schedule(2)
    near = Network(**{**vars(NET), "ranks_per_host": (2,)})
    assert near.predict(schedule, 1000) == pytest.approx(100 + 1 + 10 + 1)


def test_hosts_of_other_worlds_are_single():
    assert NET.hosts(4).tolist() == [0, 0, 1, 1]
    assert NET.hosts(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "two_shot_pull", "double_tree"])
def test_more_bytes_take_longer(n, name):
    schedule = find("all_reduce", name).schedule(n)
    times = [Network().predict(schedule, nbytes) for nbytes in (8, 1 << 16, 1 << 22)]
    assert times == sorted(times)
    assert (times[2] > 2 * times[1]) == (n > 1)

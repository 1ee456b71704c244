"""Products of algorithms over groups of ranks."""

import math

import numpy as np
import pytest

from algorithms.reference import run
from pycoll.algorithms import find
from pycoll.algorithms.two_level.hierarchical import group_size
from pycoll.errors import ScheduleError
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.simulate import Loads, simulate
from pycoll.schedule.proof.verify import proven

NAMES = ("hierarchical", "hierarchical_tree", "hierarchical_ring")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("n", "local"), [(4, 4), (4, 1), (8, 2), (8, 4), (12, 4), (24, 8), (32, 16)]
)
def test_given_group_sizes(name, n, local):
    schedule = find("all_reduce", name).schedule(n, local=local)
    run(schedule)
    run(schedule, in_place=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 2, 2), (4, 2, 4), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("rest", [1, 2, 3])
def test_up_to_four_levels(name, sizes, rest):
    n = math.prod(sizes) * rest
    levels = dict(zip(("local", "local2", "local3"), sizes, strict=True))
    schedule = find("all_reduce", name).schedule(n, **levels)
    run(schedule)
    run(schedule, in_place=True)
    proven(schedule)


@pytest.mark.parametrize("network", ["fat-tree:leaf=4,pod=4,over=2", "rails:gpus=4,nodes=4"])
def test_a_level_for_each_switch_takes_fewer_rounds_through_the_core(network):
    joined = fabric(network, 256)

    def seconds(**levels):
        schedule = find("all_reduce", "hierarchical").schedule(256, **levels)
        return float(simulate(schedule, 1e4, joined).max())

    assert seconds(local=4, local2=4) < seconds(local=4)


@pytest.mark.parametrize(("name", "local"), [("hierarchical", 3), ("hierarchical_ring", 6)])
def test_groups_of_any_size(name, local):
    run(find("all_reduce", name).schedule(18, local=local), in_place=True)


def test_the_natural_size_is_at_most_the_root():
    sizes = {n: group_size(n, 0, lambda size: True) for n in (4, 6, 7, 8, 9, 12, 36, 64)}
    assert sizes == {4: 2, 6: 2, 7: 1, 8: 2, 9: 3, 12: 3, 36: 6, 64: 8}


def test_worlds():
    composite = [n for n in range(1, 30) if any(n % d == 0 for d in range(2, n))]
    even = [n for n in range(4, 30) if n % 2 == 0]
    for name, expected in zip(NAMES, (composite, even, composite), strict=True):
        entry = find("all_reduce", name)
        assert [n for n in range(1, 30) if entry.worlds(n)] == expected
    with pytest.raises(ScheduleError, match="not defined for 7 ranks"):
        find("all_reduce", "hierarchical").schedule(7)


@pytest.mark.parametrize(
    ("name", "n", "local", "possible"),
    [
        ("hierarchical", 8, 3, [1, 2, 4, 8]),
        ("hierarchical", 8, -2, [1, 2, 4, 8]),
        ("hierarchical_tree", 12, 3, [1, 2, 4]),
    ],
)
def test_impossible_groups(name, n, local, possible):
    schedule = find("all_reduce", name).schedule(n, local=local)
    with pytest.raises(ScheduleError, match="make no groups") as caught:
        list(schedule.rounds(0))
    assert str(possible) in str(caught.value)
    with pytest.raises(ScheduleError, match="make no groups"):
        assert schedule.chunks


@pytest.mark.parametrize("name", NAMES)
def test_groups_that_are_nodes_stay_on_their_rails(name):
    network, loads = fabric("rails:gpus=4,nodes=4,over=4", 16), Loads()
    simulate(find("all_reduce", name).schedule(16, local=4), 1e6, network, loads=loads)
    busy = dict(
        zip(network.first, np.split(loads.busy[:-1], [*network.first.values()][1:]), strict=True)
    )
    assert busy["near out"].min() > 0
    assert busy["out"].min() > 0
    assert busy["up"].max() == busy["down"].max() == 0  # no byte goes through the spine

"""Swing and Bine: partners, whom they reach, and the links that they spare."""

import pytest

from pycoll.algorithms import find
from pycoll.algorithms.swing import distances, reached
from pycoll.errors import ScheduleError
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.simulate import simulate
from pycoll.schedule.pictures import Arrow, transfers

SIZES = [2, 4, 8, 16, 64, 256]


def test_the_distances_of_the_paper():
    assert distances(64) == [1, -1, 3, -5, 11, -21]


@pytest.mark.parametrize("n", SIZES)
def test_partners_reach_all_ranks_once(n):
    for d, ahead in zip(distances(n), reached(n), strict=True):
        mine = set(ahead)
        partners = {(d - x) % n for x in ahead}
        assert len(mine) == len(partners) == len(ahead)
        assert not mine & partners
    first = reached(n)[0]
    assert {*first, *((distances(n)[0] - x) % n for x in first)} == set(range(n))


@pytest.mark.parametrize("root", [0, 3])
def test_a_bine_tree_joins_nearer_ranks_than_a_binomial_tree(root):
    def ways(name):
        arrows = transfers(find("broadcast", name).schedule(64, root=root))
        steps = [abs(a.src - a.dst) for a in arrows if isinstance(a, Arrow)]
        assert len(steps) == 63
        return sum(min(step, 64 - step) for step in steps)

    # The paper says a third for large n; the shorter way around is counted for both.
    assert ways("bine") < 0.75 * ways("binomial")


def test_swing_on_a_ring_of_64_crosses_fewer_links():
    network = fabric("torus:64", 64)
    times = {
        name: max(simulate(find("all_reduce", name).schedule(64), 1 << 20, network))
        for name in ("swing", "halving_doubling", "ring")
    }
    assert times["swing"] < 0.8 * times["halving_doubling"]
    assert times["swing"] < times["ring"]


def test_worlds_that_are_no_powers_of_two_are_refused():
    with pytest.raises(ScheduleError, match="12"):
        find("all_reduce", "swing").schedule(12)

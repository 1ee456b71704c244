"""Swing and Bine: partners, whom they reach, and the links that they spare."""

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.algorithms.locality.grid import grid
from pycoll.algorithms.locality.swing import chunks_of, distances, partners
from pycoll.errors import ScheduleError
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.simulate import simulate
from pycoll.schedule.pictures import Arrow, transfers

SIZES = [2, 4, 8, 16, 64, 256]


def test_the_distances_of_the_paper():
    assert distances(64) == [1, -1, 3, -5, 11, -21]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("n", SIZES)
def test_partners_are_so_mutually_and_reach_all_ranks_once(n, axes):
    rounds, reached = partners(n, axes), [{rank} for rank in range(n)]
    chunk = chunks_of(rounds, n)
    assert sorted(chunk) == list(range(n))
    for partner in reversed(rounds):
        assert np.array_equal(partner[partner], np.arange(n))
        assert all(not reached[rank] & reached[partner[rank]] for rank in range(n))
        reached = [reached[rank] | reached[partner[rank]] for rank in range(n)]
        runs = [sorted(chunk[list(found)]) for found in reached]
        assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    assert reached[0] == set(range(n))


@pytest.mark.parametrize(
    ("n", "axes", "lengths"), [(64, 2, [8, 8]), (30, 3, [3, 2, 5]), (7, 2, [1, 7])]
)
def test_grids_are_as_even_as_divisors_allow(n, axes, lengths):
    assert grid(n, axes) == lengths


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


def test_swing_and_buckets_along_the_axes_of_a_torus_cross_fewer_links():
    network = fabric("torus:16x16", 256)

    def took(name, nbytes, **params):
        return max(simulate(find("all_reduce", name).schedule(256, **params), nbytes, network))

    assert took("swing", 1 << 20, axes=2) < 0.8 * took("swing", 1 << 20, axes=1)
    assert took("bucket", 1 << 10, axes=2) < 0.2 * took("ring", 1 << 10)
    assert took("swing", 1 << 10, axes=2) < took("bucket", 1 << 10, axes=2)
    assert took("bucket", 1 << 28, axes=2) < took("swing", 1 << 28, axes=2)


@pytest.mark.parametrize("root", [0, 3])
def test_a_bine_reduce_is_its_broadcast_backwards(root):
    def ways(collective):
        arrows = transfers(find(collective, "bine").schedule(16, root=root))
        found = [(a.round, a.src, a.dst) for a in arrows if isinstance(a, Arrow)]
        last = max(number for number, *_ in found)
        return {
            (last - n, dst, src) if collective == "reduce" else (n, src, dst)
            for n, src, dst in found
        }

    assert ways("reduce") == ways("broadcast")


def test_worlds_that_are_no_powers_of_two_are_refused():
    with pytest.raises(ScheduleError, match="12"):
        find("all_reduce", "swing").schedule(12)

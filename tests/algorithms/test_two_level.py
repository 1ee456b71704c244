"""Collectives over hosts: proven for many placements, and what leaves a host is a formula."""

import numpy as np
import pytest

from algorithms.reference import run
from algorithms.two_level_product import composed, product
from pycoll.algorithms import find
from pycoll.algorithms.two_level import subtrees
from pycoll.algorithms.two_level.plans import PLANS
from pycoll.algorithms.two_level.stages import Hosts
from pycoll.algorithms.two_level.subtrees import cut_of
from pycoll.runtime.selection.select import select
from pycoll.runtime.selection.topology import Topology
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.table import build_table
from pycoll.schedule.proof.verify import prove
from pycoll.types import DType

PLACES = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 1, 1, 1, 1, 1),
    (0, 1, 1, 0, 2, 1, 2),
    (0, 0, 1, 1, 2, 2, 3, 3),
    (0, 1, 2, 2),
]
BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def cases():
    for of in PLACES:
        least = min(of.count(h) for h in set(of))
        for collective in PLANS:
            several = collective not in ("gather", "scatter") and least > 1
            for columns in (1, least) if several else (1,):
                last = len(of) - 1 if COLLECTIVES[collective].rooted else 0
                for root in sorted({0, last}):
                    yield collective, Hosts(of, columns, root)


def schedule_of(collective, hosts, nbytes=1 << 20):
    """Return the schedule of a call over hosts, with what the selector takes between them."""
    reduces = COLLECTIVES[collective].reduces
    order = "tree" if reduces else None
    dtype = DType.FLOAT32 if reduces else None
    choice = select(collective, nbytes, hosts.count, order=order, dtype=dtype, messages=True)
    order = "" if not reduces else "tree" if Topology(hosts.of, 0).nests else "any"
    params = {k: min(v, 3) for k, v in choice.params.items()}
    rooted = {"root": hosts.root} if COLLECTIVES[collective].rooted else {}
    made = product(collective, hosts, choice.algorithm, order, **params)
    return made.schedule(hosts.n, **rooted), choice


def sent(schedule, of):
    """Return the chunks that leave each host."""
    table = build_table(schedule)
    of = np.array(of)
    owner = of[table.owner[table.unit]]
    away = owner != of[table.rank]
    source = np.where(table.is_write, owner, of[table.rank])[away]
    return np.bincount(source, minlength=of.max() + 1)


@pytest.mark.parametrize(("collective", "hosts"), list(cases()), ids=str)
def test_every_collective_is_proven(collective, hosts):
    schedule, _ = schedule_of(collective, hosts)
    proof = prove(schedule)
    assert proof.order in ("tree", schedule.algorithm.order)
    run(schedule)


@pytest.mark.parametrize(("collective", "hosts"), list(cases()), ids=str)
def test_what_leaves_a_host_is_a_formula(collective, hosts):
    schedule, choice = schedule_of(collective, hosts)
    n, h = hosts.n, hosts.count
    size = np.array([len(group) for group in hosts.groups])
    home = np.arange(h) == hosts.of[hosts.root]
    m = schedule.chunks
    expected = {
        "all_reduce": np.full(h, 2 * (h - 1) * m // h),
        "all_gather": (h - 1) * size,
        "reduce_scatter": n - size,
        "all_to_all": size * (n - size),
        "gather": np.where(home, 0, size),
        "scatter": np.where(home, n - size, 0),
    }
    found = sent(schedule, hosts.of)
    if collective in ("all_reduce", *BLOCKS):
        assert found.tolist() == expected[collective].tolist(), choice.name
    else:  # once for every other host, and once more if a tree does not end at the root
        assert found.sum() in ((h - 1) * m, h * m), choice.name


@pytest.mark.parametrize(
    "of",
    [
        *PLACES,
        (0, 1, 1),
        (0, 0, 0, 1, 1, 1),
        (0, 0, 1, 1, 1, 1),
        (0,) * 3 + (1,) * 3 + (2,) * 3 + (3,) * 3,
        (0,) * 6 + (1,) * 6,
        (0,) * 5 + (1,) * 6 + (2,),
        (0,) * 12 + (1,) * 12 + (2,) * 12,
    ],
    ids=str,
)
def test_an_all_reduce_by_subtrees_is_along_the_tree_over_all_ranks(of):
    """Wherever these are; a host hands on a vector for each subtree whose ranks it has."""
    cut = cut_of(of)
    assert sorted(r for parts in cut.parts for part in parts for r in part) == list(range(len(of)))
    for columns in {1, min(of.count(host) for host in set(of))}:
        hosts = Hosts(of, columns)
        made = composed("all_reduce", hosts, subtrees.all_reduce(hosts), "tree")
        schedule = made.schedule(len(of))
        assert prove(schedule).order == "tree"
        run(schedule)
        whole, count = schedule.chunks, hosts.count
        want = [(count - 1) * (len(parts) + 1) * whole // count for parts in cut.parts]
        assert sent(schedule, of).tolist() == want


@pytest.mark.parametrize(("p", "hosts"), [(3, 4), (6, 3), (12, 2), (24, 5), (48, 4), (96, 3)])
def test_hosts_of_consecutive_ranks_have_few_subtrees(p, hosts):
    topology = Topology(tuple(r // p for r in range(p * hosts)), 0)
    assert not topology.nests
    assert topology.few_subtrees
    assert cut_of(topology.hosts).most <= 2 * np.log2(p)
    assert not Topology(tuple(r // p for r in range(p * 128)), 0).few_subtrees  # of too many hosts


def test_flat_schedules_send_more():
    of = (0, 0, 0, 0, 1, 1, 1, 1)
    flat = find("all_reduce", "two_shot_pull").schedule(8)
    assert sent(flat, of).tolist() == [32, 32]  # of 8 chunks, where one vector would do
    schedule, _ = schedule_of("all_reduce", Hosts(of, 4))
    assert sent(schedule, of).tolist() == [schedule.chunks] * 2


def test_one_message_for_each_pair_of_hosts():
    plan = PLANS["all_to_all"](Hosts((0, 0, 1, 1, 1), 1), find("all_to_all", "direct"), {})
    assert plan.across.teams == ((0, 2),)
    assert plan.across.share == 9  # pieces in one message, of which 6 are something
    assert (plan.across.gives[0] >= 0).sum() == 6


@pytest.mark.parametrize(
    ("of", "nests"),
    [
        ((0, 0, 1, 1), True),
        ((0, 0, 0, 0, 1, 1), True),
        ((0, 1, 1), False),
        ((0, 0, 1), True),
        ((0, 0, 0, 1, 1, 1), False),
        ((0, 1, 0, 1), False),
        ((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), True),
        ((0, 0, 1, 1, 1, 1), False),
    ],
)
def test_trees_that_nest(of, nests):
    assert Topology(of, 0).nests is nests
    schedule, _ = schedule_of("all_reduce", Hosts(of))
    assert (prove(schedule).order == "tree") is nests

"""One rank's plan: the same bytes as among the plans of all, at what the rank itself does."""

import tracemalloc

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.schedule.lowering.compile import peer_plan, peer_plans
from pycoll.schedule.lowering.messages import message_plan, message_plans

MIB = 1 << 20
NAMES = [f"{a.collective}/{a.name}" for a in ALGORITHMS]


def ways(entry):
    """Yield, for each way to compile, the function for one rank and that for all."""
    for options in ({"direct": True}, {"direct": False}, {"direct": True, "in_place": True}):
        if entry.in_place or not options.get("in_place"):
            yield peer_plan, peer_plans, options
    for apart in (False, True):
        yield message_plan, message_plans, {"apart": apart}


@pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)
def test_the_same_bytes(entry):
    for n in (6, 19):
        if not entry.works_for(n):
            continue
        for root in {0, n - 1} if "root" in entry.params else {0}:
            schedule = entry.schedule(n, **({"root": root} if "root" in entry.params else {}))
            for one, everybody, options in ways(entry):
                plans = everybody(schedule, **options)
                for rank in (0, n // 2):
                    plan = one(schedule, rank, **options)
                    where = n, rank, root, one.__name__, options
                    assert plan.slots == plans[rank].slots, where
                    assert np.array_equal(plan.code, plans[rank].code), where
                    assert np.array_equal(plan.operands, plans[rank].operands), where


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("all_reduce/recursive_doubling", 1),
        ("all_reduce/one_shot", 2),
        ("all_reduce/two_shot_push", 3),
        ("all_reduce/two_shot_pull", 2),
        ("all_reduce/halving_doubling", 1),
        ("reduce_scatter/halving", 1),
        ("all_gather/doubling", 1),
        ("scan/chain", 2),
        ("exscan/chain", 2),
        ("scan/doubling", 1),
        ("exscan/doubling", 1),
        ("all_reduce/ring", 5),
        ("reduce_scatter/direct", 2),
        ("all_gather/direct_pull", 2),
        ("reduce/binomial", 1),
        ("all_to_all/direct", 2),
    ],
)
def test_memory_to_compile_grows_with_what_the_rank_does(name, most):
    """Bounds in MiB at 1,024 ranks; tables of the whole world take hundreds."""
    entry = find(*name.split("/"))
    for one, _, options in ways(entry):
        schedule = entry.schedule(1024)
        tracemalloc.start()
        one(schedule, 341, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most * MIB, (options, peak / MIB)

"""The four transitions, and the in-order sums of micro-batches."""

import numpy as np
import pytest

from parallel import serial
from pycoll.errors import ArgumentError
from pycoll.parallel import Placed, Placement
from pycoll.parallel.channels import Channel, Ledger
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.state.gradients import Sums, plan_sum
from pycoll.parallel.state.layout import ALIGN, Parameter, make_layouts
from pycoll.testing import run_threads

R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_transitions(n):
    def rank(comm):
        channel = Channel(comm, "dp", Ledger())
        whole = np.arange(30.0 * n)
        term = Placed(whole * (comm.rank + 1), P, channel, "x")
        shard = term.to(S, "gradient", "tree", np.empty(30)).wait()
        both = term.to(R, "gradient", "tree").wait()
        assert both is term.data
        replicated = Placed(shard, S, channel, "x").to(R, "parameter", out=np.empty(30 * n)).wait()
        view = Placed(replicated, R, channel, "x").to(S, "parameter").wait()
        assert np.shares_memory(view, replicated)
        ledger = channel.ledger
        return (
            shard,
            both,
            replicated,
            view,
            ledger.wire["gradient", "dp"],
            sum(ledger.wire.values()),
        )

    expected = np.arange(30.0 * n) * (n * (n + 1) // 2)
    for r, found in enumerate(run_threads(n, rank)):
        own = expected[30 * r : 30 * (r + 1)]
        for value, right in zip(found, (own, expected, expected, own), strict=False):
            np.testing.assert_array_equal(value, right)
        block = 30 * 8
        assert found[4:] == (3 * (n - 1) * block, 4 * (n - 1) * block)


@pytest.mark.parametrize("step", [(R, P), (S, P), (R, R), (S, S), (P, P)])
def test_other_transitions_do_not_exist(step):
    def rank(comm):
        placed = Placed(np.zeros(4), step[0], Channel(comm, "dp", Ledger()), "x")
        with pytest.raises(ArgumentError, match=f"from {step[0].value} to {step[1].value}"):
            placed.to(step[1], "x")

    run_threads(1, rank)


@pytest.mark.parametrize("order", ["tree", "rank"])
@pytest.mark.parametrize("k", [*range(1, 18), 31, 33])
def test_micro_batches_are_added_in_order(k, order):
    rng = np.random.default_rng(k)
    terms = [rng.standard_normal(50).astype(np.float32) for _ in range(k)]
    made = []

    def new():
        made.append(np.zeros(50, np.float32))
        return made[-1]

    sums = Sums(np.zeros(50, np.float32), new)
    for term, turn in zip(terms, plan_sum(k, order), strict=True):
        where = sums.begin(turn)
        where[...] = where + term if turn.add else term
        sums.end(turn)
    np.testing.assert_array_equal(sums.take(), serial.ORDERS[order](terms))
    needed = max(0, (k - 1).bit_length() - 1) if order == "tree" else 0
    assert max_depth(plan_sum(k, order)) - 1 <= needed
    if order == "tree" and k & (k - 1) == 0:
        assert max_depth(plan_sum(k, order)) - 1 == needed
    assert bool(made) == (max_depth(plan_sum(k, order)) > 1)


def max_depth(plan):
    depth = most = 0
    for term in plan:
        depth += not term.add
        most = max(most, depth)
        depth -= term.merges
    assert depth == 1
    return most


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("elements", [1, 40, 10**6, None])
def test_layouts_hold_every_parameter_once(shards, elements):
    rng = np.random.default_rng(0)
    groups = [
        [Parameter(f"l{i}.p{j}", ParameterSpec((int(rng.integers(1, 90)),))) for j in range(i % 3)]
        for i in range(9)
    ]
    layouts = make_layouts(groups, shards, elements)
    names = [entry.parameter.name for layout in layouts for entry in layout.entries]
    assert sorted(names) == sorted(p.name for group in groups for p in group)
    for layout in layouts:
        ends = [0] + [entry.stop for entry in layout.entries]
        assert [entry.start for entry in layout.entries] == ends[:-1]
        assert layout.count == ends[-1] <= layout.padded < layout.count + shards * ALIGN
        assert layout.padded % (shards * ALIGN) == 0
        shard = layout.padded // shards
        runs = [run for r in range(shards) for run in layout.runs(r * shard, (r + 1) * shard)]
        assert sum(stop - start for start, stop, _ in runs) == layout.count
        if elements:
            assert len(layout.entries) == 1 or layout.count <= elements

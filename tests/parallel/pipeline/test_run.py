"""When a stage waits: for an array only once it needs it, and in an order that cannot deadlock."""

import threading

import numpy as np
import pytest

from pycoll.parallel import Mesh, Pipeline, Sequential
from pycoll.parallel.pipeline import transfers
from pycoll.parallel.pipeline.registry import SCHEDULES, find
from pycoll.testing import run_threads

LARGE = 1 << 19  # elements: no mailbox has room for them


class Through:
    """A layer that gives what it gets; `before` is called with the kind of pass and its number."""

    def __init__(self, before=lambda kind, number: None):
        self.before, self.seen = before, {"F": 0, "B": 0, "W": 0}

    def enter(self, kind):
        self.before(kind, self.seen[kind])
        self.seen[kind] += 1

    def parameters(self):
        return {}

    def forward(self, params, x):
        self.enter("F")
        return x, None

    def backward_input(self, params, saved, dy):
        self.enter("B")
        return dy

    def backward_weight(self, params, saved, dy):
        self.enter("W")
        return {}


class Sum:
    """A loss that shows which micro-batch it has got."""

    def forward(self, x, targets):
        return float(x[0]), 1, x

    def backward(self, saved, scale):
        return saved


def train(comm, schedule, layers, m, count):
    """Return the losses of two steps on micro-batches that differ."""
    named = [(f"layer{i}", layer) for i, layer in enumerate(layers)]
    cut = [name for name, _ in named[1:]]
    batch = [(np.full(count, i, np.float32), None) for i in range(m)]
    with (
        Mesh(comm, pp=comm.world_size) as mesh,
        Pipeline(Sequential(named), Sum(), mesh, schedule, m, cut) as engine,
    ):
        reports = [engine.step(batch) for _ in range(2)]
        reports[len(reports) :] = filter(None, [engine.flush()])
    return [report.loss for report in reports]


@pytest.mark.parametrize("count", [16, LARGE])
def test_a_stage_works_on_while_an_array_is_on_its_way(count):
    """ZB-H1 has RECV of micro-batch 1 before B of micro-batch 0, which does not need it."""
    ops = find("zb_h1").program(2, 4).stages[1]
    kinds = [(op.kind, op.micro) for op in ops]
    assert kinds.index(("RECV", 1)) < kinds.index(("B", 0)) < kinds.index(("F", 1))
    gone_back = threading.Event()

    def sender(kind, number):
        if (kind, number) == ("F", 1):
            assert gone_back.wait(10), "stage 1 waits for what it does not need yet"

    def receiver(kind, number):
        if (kind, number) == ("B", 0):
            gone_back.set()

    layers = [Through(sender), Through(receiver)]
    assert run_threads(2, train, "zb_h1", layers, 4, count) == 2 * [[1.5, 1.5]]


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("sends", [1, 4])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_no_schedule_deadlocks_without_buffers(p, sends, posted, monkeypatch):
    """Arrays that no mailbox has room for, also where no receive is posted ahead."""
    monkeypatch.setattr(transfers, "MOST_SENDS", sends)
    monkeypatch.setattr(transfers, "LARGE", 0 if posted else 1 << 40)

    def rank(comm):
        found = {}
        for schedule in SCHEDULES:
            m = max(schedule.least(p), 5)
            layers = [Through() for _ in range(p * schedule.chunks)]
            found[schedule.name] = train(comm, schedule, layers, m, LARGE), m
        return found

    for found in run_threads(p, rank, timeout=60):
        for name, (losses, m) in found.items():
            assert losses[-1] == (m - 1) / 2, name

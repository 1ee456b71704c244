"""Schedules without a flush: the bits of one process that simulates the same old parameters."""

import math

import numpy as np
import pytest

from parallel import models, serial
from pycoll.errors import ArgumentError, CollError
from pycoll.parallel import AdamW, Mesh, Pipeline
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.windows import Windows
from pycoll.testing import run_threads

SIZES = (7, 9, 8, 6, 5)
CUT = {2: ["linear2"], 3: ["linear1", "linear3"], 4: ["linear1", "linear2", "linear3"]}


def version(name, stage, micro, p, m):
    """Return how many steps a forward pass has seen, by the papers."""
    return {
        "1f1b": micro // m,
        "pipedream": max(0, micro - (p - 1 - stage)),
        "pipedream_sync": max(0, micro - (p - 1)),
        "2bw": max(0, micro // m - 1),
    }[name]


class Simulation:
    """One process that keeps all versions of all parameters."""

    def __init__(self, name, p, m, ranks, add, sizes=SIZES, cut=None, rate=1e-3):
        self.name, self.p, self.m, self.ranks, self.add = name, p, m, ranks, add
        self.model = models.mlp(sizes)
        cuts = ["linear0", *(cut or CUT.get(p, []))]
        names, self.stage = [layer for layer, _ in self.model.layers], {}
        for layer in names:
            self.stage[layer] = sum(names.index(cut) <= names.index(layer) for cut in cuts) - 1
        first = serial.first_values(self.model)
        self.steps = {parameter: [value] for parameter, value in first.items()}
        self.optimizers = {parameter: serial.AdamW(rate) for parameter in self.steps}
        self.losses = []

    def params(self, base, micro):
        found = {}
        for parameter, values in self.steps.items():
            stage = self.stage[parameter.split(".")[0]]
            found[parameter] = values[base + version(self.name, stage, micro, self.p, self.m)]
        return found

    def train(self, batches):
        """Train on the batches of all ranks, by call; then the pipeline is empty."""
        base = len(next(iter(self.steps.values()))) - 1
        per = self.m if self.name in ("1f1b", "2bw") else 1
        plain = serial.no_decay(self.model)
        for first in range(0, self.m * len(batches), per):
            parts = []
            for rank in range(self.ranks):
                for micro in range(first, first + per):
                    sample = batches[micro // self.m][rank][micro % self.m]
                    given = self.params(base, micro)
                    parts.append(serial.gradients(self.model, models.CrossEntropy(), given, sample))
            scale = 1 / sum(part[1] for part in parts)
            for parameter, values in self.steps.items():
                total = self.add([part[2][parameter] for part in parts])
                new = {parameter: values[-1].copy()}
                self.optimizers[parameter].step(new, {parameter: total}, scale, plain)
                values.append(new[parameter])
            self.losses += [part[0] for part in parts]


def batch(call, rank, m):
    return models.batches(m, seed=100 * call + rank, sizes=SIZES)


def rank(comm, name, dp, p, m, calls, zero, recompute="none"):
    settings = {"zero": zero, "optimizer": AdamW(), "recompute": recompute}
    with (
        Mesh(comm, dp=dp, pp=p) as mesh,
        Pipeline(
            models.mlp(SIZES), models.CrossEntropy(), mesh, name, m, CUT.get(p), **settings
        ) as engine,
    ):
        reports = []
        for number, count in enumerate(calls):
            for call in range(count):
                sample = batch(10 * number + call, mesh.coordinate("dp"), m)
                reports.append(engine.step(sample))
            found = engine.gather()  # drains the pipeline
        return reports, found, engine.versions, engine.ledger.live["parameter"]


@pytest.mark.parametrize("name", ["pipedream", "pipedream_sync", "2bw"])
@pytest.mark.parametrize(
    ("dp", "p", "m", "zero", "recompute"),
    [
        (1, 1, 2, 0, "none"),
        (1, 2, 2, 0, "none"),
        (1, 3, 3, 1, "full"),
        (1, 4, 4, 3, "none"),
        (2, 2, 4, 1, "none"),
        (2, 2, 2, 2, "full"),
    ],
)
def test_the_bits_are_those_of_a_serial_simulation(name, dp, p, m, zero, recompute):
    calls = (5, 3)  # with all in flight finished between them
    add = serial.micro_outermost("tree", dp) if zero >= 2 else serial.tree
    expected = Simulation(name, p, m, dp, add)
    for number, count in enumerate(calls):
        expected.train([[batch(10 * number + c, r, m) for r in range(dp)] for c in range(count)])
    results = run_threads(dp * p, rank, name, dp, p, m, calls, zero, recompute)
    for place, (reports, found, versions, _) in enumerate(results):
        for parameter, values in expected.steps.items():
            assert found[parameter].tobytes() == values[-1].tobytes(), parameter
        stage = place % p
        held = {"pipedream": p - stage, "pipedream_sync": p, "2bw": 2}[name]
        assert versions == (held if p > 1 or name == "2bw" else 1)
        assert math.isnan(reports[0].loss)  # the report of a step comes with the next call
        each = np.reshape(expected.losses, (-1, m * dp))[:4].mean(axis=1) / 6
        np.testing.assert_allclose([r.loss for r in reports[1:5]], each, rtol=1e-6)


def test_a_version_is_memory():
    """Versions that are kept are parameters in the ledger, and go when nobody needs them."""

    def one(comm):
        with (
            Mesh(comm, pp=2) as mesh,
            Pipeline(models.mlp(SIZES), models.CrossEntropy(), mesh, "pipedream", 4) as engine,
        ):
            alone = engine.ledger.live["parameter"]
            peaks = [engine.step(batch(call, 0, 4)).peak_bytes for call in range(3)]
            engine.flush()
            return alone, engine.ledger.live["parameter"], max(peaks), engine.ledger.total

    for stage, (alone, after, peak, rest) in enumerate(run_threads(2, one)):
        assert after == alone
        assert peak - rest >= (1 - stage) * alone  # stage 0 holds one version more


@pytest.mark.parametrize("name", ["pipedream", "pipedream_sync", "2bw"])
def test_windows_repeat_and_drain_for_every_size(name):
    schedule = find(name)
    for p in (1, 2, 3, 5):
        for m in (1, 2, 5):
            if m < schedule.least(p):
                continue
            for stage in {0, p - 1}:
                windows = Windows(schedule, p, m, stage)
                for steps in (1, 2, 9):
                    ops = [op for t in range(steps) for op in windows.step(t)]
                    ops += windows.drain(steps)
                    assert ops == list(schedule.program(p, m, steps).stages[stage])


@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 1), (2, 3)])
def test_every_loss_is_told(p, m):
    def one(comm):
        with (
            Mesh(comm, pp=p) as mesh,
            Pipeline(
                models.mlp(SIZES), models.CrossEntropy(), mesh, "pipedream", m, CUT.get(p)
            ) as engine,
        ):
            told = [engine.step(batch(call, 0, m)).loss for call in range(7)]
            return [*told, engine.flush().loss]

    found = run_threads(p, one)
    assert all(repr(told) == repr(found[0]) for told in found)
    expected = Simulation("pipedream", p, m, 1, serial.tree)
    expected.train([[batch(call, 0, m)] for call in range(7)])
    losses = np.reshape(expected.losses, (7, m)).mean(axis=1) / 6
    known = [loss for loss in found[0][:-1] if not math.isnan(loss)]
    assert len(known) >= 5
    np.testing.assert_allclose(known, losses[: len(known)], rtol=1e-6)
    assert found[0][-1] == pytest.approx(losses[-1], rel=1e-6)


def test_stages_with_different_rates_hear_of_it():
    def one(comm):
        with (
            Mesh(comm, pp=2) as mesh,
            Pipeline(models.mlp(SIZES), models.CrossEntropy(), mesh, "pipedream", 2) as engine,
        ):
            for call in range(4):
                engine.step(batch(call, 0, 2), lr=(0.1, 0.2)[comm.rank])

    def both(comm):
        with pytest.raises(CollError, match=r"stage 1 took a step with lr=0\.2, stage 0 with lr=0"):
            one(comm)

    run_threads(2, both)


def test_what_has_no_meaning_without_a_flush_is_refused():
    def one(comm, **more):
        with Mesh(comm, pp=2) as mesh, pytest.raises(ArgumentError, match="no flush"):
            Pipeline(models.mlp(SIZES), models.CrossEntropy(), mesh, "2bw", 4, **more)

    for more in ({"clip_norm": 1.0}, {"precision": "fp16"}, {"nonfinite": "skip"}):
        run_threads(2, lambda comm, more=more: one(comm, **more))


def test_infinite_gradients_are_an_error_everywhere():
    def one(comm):
        with (
            Mesh(comm, pp=2) as mesh,
            Pipeline(models.mlp(SIZES), models.CrossEntropy(), mesh, "pipedream", 2) as engine,
        ):
            x, y = batch(0, 0, 1)[0]
            bad = [(x * np.float32(np.inf), y)] * 2

            def train():
                for _ in range(4):
                    engine.step(bad)

            with np.errstate(all="ignore"), pytest.raises(CollError) as caught:
                train()
        return str(caught.value)

    texts = run_threads(2, one)
    assert "not finite" in texts[1]
    assert "stage 1, STEP of step 0" in texts[1]


def test_digits_are_learnt_as_well_as_with_a_flush():
    """By the simulation, which has the bits of the engine."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = (data.data[order] / 16).astype("f4"), data.target[order]
    found, m, size, train = {}, 4, 16, 1437
    for name in ("1f1b", "2bw", "pipedream", "pipedream_sync"):
        rate = 5e-3 if name in ("1f1b", "2bw") else 2e-3  # the others step m times as often
        simulation = Simulation(name, 2, m, 1, serial.tree, (64, 32, 10), ["linear1"], rate)
        rng, batches = np.random.default_rng(3), []
        for _ in range(14):
            order = rng.permutation(train)[: train // (m * size) * m * size]
            for chosen in order.reshape(-1, m, size):
                batches.append([[(images[rows], labels[rows]) for rows in chosen]])
        simulation.train(batches)
        x = images[train:]
        for layer, module in simulation.model.layers:
            params = {
                local: simulation.steps[f"{layer}.{local}"][-1] for local in module.parameters()
            }
            x = module.forward(params, x)[0]
        found[name] = np.mean(x.argmax(axis=1) == labels[train:])
    assert found["1f1b"] > 0.95
    assert min(found.values()) > found["1f1b"] - 0.01, found

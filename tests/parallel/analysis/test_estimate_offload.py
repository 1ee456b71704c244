"""Activations in memory and in a file: estimates are what the ledger counts, on any disk."""

import time
import tracemalloc
from functools import partial

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Pipeline, estimate
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential, TransformerConfig
from pycoll.parallel.random import Key
from pycoll.parallel.state.storage import Storage
from pycoll.testing import run_threads
from samples import sample

M = 3  # micro-batches
STREAMS = "pipedream", "2bw"


def gpt(comm=None):
    sizes = {"vocabulary": 64, "features": 32, "heads": 2, "depth": 5, "length": 32}
    return GPT(TransformerConfig(**sizes, comm=comm), seed=1)


def batch(step):
    tokens = np.random.default_rng(step).integers(0, 64, (M, 4, 33))
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def both(comm, axes, schedule, **options):
    """Return what the ledger has counted on this rank, and what is estimated."""
    with Mesh(comm, **axes) as mesh:
        network = gpt(mesh.tp if "tp" in axes else None)
        more = {"micro_batches": M, "sample": batch(9)[0], **options}
        if schedule is None:
            engine = DataParallel(network, network.loss(), mesh, **options)
        else:
            engine = Pipeline(network, network.loss(), mesh, schedule, M, **options)
            more |= {"schedule": schedule, "stage": engine.stage}
        told = estimate(network, None, axes, **more)
        with engine:
            reports = [engine.step(batch(step)) for step in range(5 if schedule in STREAMS else 2)]
            assert not engine.ledger.stored["activation"] or schedule in STREAMS
        return reports, told


def check(ranks, axes, schedule, **options):
    for reports, told in run_threads(ranks, partial(both, **options), axes, schedule):
        away = options["offload"] in ("activations", "all")
        stored = {kind: max(r.stored.get(kind, 0) for r in reports) for kind in reports[0].stored}
        assert told.peak == pytest.approx(max(r.peak_bytes for r in reports), rel=0.01)
        assert told.stored == stored.get("optimizer", 0)
        assert told.stored_activation == pytest.approx(stored.get("activation", 0), rel=0.01)
        if away:
            held = max(r.peaks["activation"] for r in reports)
            assert told.activation == pytest.approx(held, rel=0.01)
        assert told.activation > 0


RECOMPUTES = ("none", "full", "selective", 2)


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("offload", ["activations", "optimizer", "all"])
@pytest.mark.parametrize(
    ("ranks", "axes", "schedule", "zero"),
    [(1, {"dp": 1}, None, 0), (2, {"dp": 2}, None, 3), (2, {"pp": 2}, "1f1b", 1)],
)
def test_peaks_are_those_of_the_ledger(ranks, axes, schedule, zero, offload, recompute):
    check(ranks, axes, schedule, zero=zero, offload=offload, recompute=recompute)


@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        ({"pp": 2}, "gpipe"),
        ({"pp": 2}, "zb_h1"),
        ({"pp": 2}, "zb_v"),
        ({"pp": 2}, "interleaved:2"),
        ({"pp": 2}, "pipedream"),
        ({"pp": 4}, "pipedream"),  # fewer micro-batches in a step than are in flight
        ({"pp": 3}, "2bw"),
        ({"tp": 2}, None),
    ],
)
def test_every_schedule(axes, schedule):
    ranks = int(np.prod(list(axes.values())))
    for recompute in sample(("none", 2), ("none",)):
        check(ranks, axes, schedule, offload="all", recompute=recompute, zero=1)


def chain(width=64, depth=5):
    layers = []
    for i in range(depth):
        layers += [(f"linear{i}", Linear(width, width, Key(i).fold("x"))), (f"relu{i}", ReLU())]
    return Sequential(layers)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_layers_that_keep_what_others_keep(precision):
    options = {"offload": "activations", "precision": precision, "prefetch": 2, "zero": 2}
    sample = np.ones((100, 64), "f4"), np.zeros(100, int)

    def rank(comm):
        with (
            Mesh(comm, dp=-1) as mesh,
            DataParallel(chain(), CrossEntropy(), mesh, **options) as engine,
        ):
            return [engine.step([sample] * 2) for _ in range(2)][-1]

    told = estimate(chain(), None, {"dp": 2}, micro_batches=2, sample=sample, **options)
    for report in run_threads(2, rank):
        assert report.peak_bytes == told.peak
        assert report.peaks["activation"] == told.activation
        assert report.stored["activation"] == told.stored_activation


def traced_step(comm, depth, recompute="none"):
    """Return bytes that were allocated in a step, and its report."""
    x = np.ones((8192, 64), "f4")
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(
            chain(depth=depth), CrossEntropy(), mesh, offload="activations", recompute=recompute
        ) as engine,
    ):
        batch = [(x, np.zeros(len(x), int))]
        engine.step(batch)
        tracemalloc.start()
        report = engine.step(batch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, report


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_in_memory_depends_on_no_disk(monkeypatch, recompute):
    """With a disk that is slow the same is counted, and the machine holds as little."""
    quick = run_threads(1, traced_step, 8, recompute)[0]
    write = Storage.write

    def late(self, data, start):
        time.sleep(0.02)
        write(self, data, start)

    monkeypatch.setattr(Storage, "write", late)
    slow = run_threads(1, traced_step, 8, recompute)[0]
    deep = run_threads(1, traced_step, 16, recompute)[0]
    array = 8192 * 64 * 4
    for allocated, report in (quick, slow, deep):
        assert report.peaks["activation"] == quick[1].peaks["activation"]
        assert allocated <= report.peaks["activation"] + 4 * array  # what layers make meanwhile
    assert deep[1].stored["activation"] > 1.8 * slow[1].stored["activation"]


def test_activations_are_known_with_a_sample_only():
    told = estimate(gpt(), offload="all")
    assert told.activation is None
    assert "activations" not in str(told)
    told = estimate(gpt(), offload="all", sample=batch(0)[0])
    assert told.peak > estimate(gpt(), offload="all").peak
    assert f"{told.stored_activation:,} B" in str(told)
    plain = estimate(gpt(), sample=batch(0)[0])
    assert plain.peak == estimate(gpt()).peak  # the ledger counts none then
    assert plain.activation > 1.5 * told.activation


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="a number of parameters has no layers"):
        estimate(1000, sample=batch(0)[0])
    with pytest.raises(ArgumentError, match="sample: layer embedding: indices have type"):
        estimate(gpt(), sample=(np.zeros((4, 8)), None))

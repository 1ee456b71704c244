"""Pipelines train to the bits of one process, with every schedule, ZeRO stage and mesh."""

import os
import signal
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, CollError, MismatchError, PeerLost, ScheduleError
from pycoll.parallel import AdamW, DataParallel, Mesh, Pipeline
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential, TransformerConfig
from pycoll.parallel.pipeline.engine import cut_units
from pycoll.parallel.random import Key
from pycoll.testing import run_processes, run_threads

SYNCHRONOUS = ("naive", "gpipe", "1f1b", "zb_h1", "interleaved:2", "zb_v", "dualpipe_v")
SETTINGS = {"optimizer": AdamW(lr=1e-2), "clip_norm": 0.5, "bucket_bytes": 600}


def model(depth=17):
    key = Key(0)
    layers = [Linear(8, 8, key.fold(str(i))) if i % 2 == 0 else ReLU() for i in range(depth)]
    return Sequential([(f"layer{i}", layer) for i, layer in enumerate(layers)])


def batch(step, place, m):
    rng = np.random.default_rng([step, place])
    return [(rng.standard_normal((5, 8)).astype("f4"), rng.integers(0, 8, 5)) for _ in range(m)]


def plain(comm, zero, m, steps):
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(model(), CrossEntropy(), mesh, zero=zero, **SETTINGS) as engine,
    ):
        reports = [engine.step(batch(s, mesh.coordinate("dp"), m)) for s in range(steps)]
        return [(r.loss, r.samples, r.grad_norm) for r in reports], engine.gather()


def piped(comm, zero, m, steps, dp, pp, schedule):
    with (
        Mesh(comm, dp=dp, pp=pp) as mesh,
        Pipeline(
            model(), CrossEntropy(), mesh, schedule, micro_batches=m, zero=zero, **SETTINGS
        ) as engine,
    ):
        reports = [engine.step(batch(s, mesh.coordinate("dp"), m)) for s in range(steps)]
        return [(r.loss, r.samples, r.grad_norm) for r in reports], engine.gather()


def same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (1, 4), (2, 2), (4, 2), (1, 1)])
def test_the_bits_are_those_of_one_process(dp, pp, zero):
    m, steps = 5, 3
    expected = run_threads(dp, plain, zero, m, steps)[0]
    for schedule in SYNCHRONOUS:
        for found in run_threads(dp * pp, piped, zero, m, steps, dp, pp, schedule):
            same(found, expected)


def test_fifty_steps_in_processes():
    expected = run_threads(1, plain, 0, 8, 50)[0]
    for found in run_processes(2, piped, 1, 8, 50, 1, 2, "zb_h1"):
        same(found, expected)


def test_a_tree_of_micro_batches_and_ranks():
    """Trees nest: 2 ranks of 4 micro-batches are 1 rank of 8, through a pipeline, too."""

    def one(comm):
        with (
            Mesh(comm, dp=1) as mesh,
            DataParallel(model(), CrossEntropy(), mesh, **SETTINGS) as engine,
        ):
            for s in range(3):
                engine.step(batch(s, 0, 4) + batch(s, 1, 4))
            return engine.gather()

    expected = run_threads(1, one)[0]
    for _, found in run_threads(4, piped, 1, 4, 3, 2, 2, "1f1b"):
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes()


def gpt(comm, mesh, engine_of):
    tp = mesh.group("tp")
    config = TransformerConfig(
        vocabulary=32,
        features=16,
        heads=2,
        depth=2,
        length=8,
        comm=tp if tp.world_size > 1 else None,
    )
    network = GPT(config, seed=1)
    with engine_of(network, network.loss(), mesh) as engine:
        losses = []
        for s in range(8):
            rng = np.random.default_rng([s, mesh.coordinate("dp")])
            tokens = [rng.integers(0, 32, (2, 9)) for _ in range(4)]
            losses.append(engine.step([(t[:, :-1], t[:, 1:]) for t in tokens], lr=1e-2).loss)
        return losses


def test_three_dimensions():
    def one(comm):
        with Mesh(comm, dp=-1) as mesh:
            return gpt(comm, mesh, lambda *parts: DataParallel(*parts))

    def many(comm, zero):
        with Mesh(comm, dp=2, pp=2, tp=2) as mesh:
            return gpt(comm, mesh, lambda *p: Pipeline(*p, "1f1b", micro_batches=4, zero=zero))

    expected = run_threads(2, one)[0]
    for zero in (1, 3):
        for losses in run_threads(8, many, zero):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_states_go_from_mesh_to_mesh():
    def save(comm):
        with (
            Mesh(comm, pp=2) as mesh,
            Pipeline(model(), CrossEntropy(), mesh, "gpipe", 4) as engine,
        ):
            engine.step(batch(0, 0, 4))
            return engine.state_dict()

    saved = run_threads(2, save)
    assert saved[0]["parameters"].keys() == saved[1]["parameters"].keys()

    def load(comm, dp, pp, zero):
        kind = Pipeline if pp > 1 else DataParallel
        more = {"schedule": "1f1b", "micro_batches": 4} if pp > 1 else {}
        with (
            Mesh(comm, dp=dp, pp=pp) as mesh,
            kind(model(), CrossEntropy(), mesh, zero=zero, **more) as engine,
        ):
            engine.load_state_dict(saved[0])
            engine.step(batch(1, mesh.coordinate("dp"), 4))
            return engine.state_dict()

    expected = run_threads(1, load, 1, 1, 0)[0]
    for found in run_threads(4, load, 1, 4, 3):
        for kind in ("parameters", *AdamW().slots):
            for name, value in expected[kind].items():
                assert found[kind][name].tobytes() == value.tobytes()


def test_predictions_are_the_same_on_all_ranks():
    def rank(comm, pp):
        x = np.ones((3, 8), "f4")
        with (
            Mesh(comm, pp=pp) as mesh,
            Pipeline(model(), CrossEntropy(), mesh, "zb_v", 2) as engine,
        ):
            return engine.predict(x)

    expected = run_threads(1, rank, 1)[0]
    for found in run_threads(3, rank, 3):
        assert found.tobytes() == expected.tobytes()


def test_what_goes_over_the_wire():
    def rank(comm):
        with Mesh(comm, pp=2) as mesh, Pipeline(model(), CrossEntropy(), mesh, "1f1b", 4) as engine:
            return engine.step(batch(0, 0, 4)).bytes

    for sent in run_threads(2, rank):
        assert sent["pipeline"] == 4 * 5 * 8 * 4  # micro-batches, samples, features, bytes


class Faulty(Linear):
    def backward_input(self, params, saved, dy):
        raise ArgumentError("no gradient today")


def make(comm, network=None, loss=None, **settings):
    with (
        Mesh(comm, pp=2) as mesh,
        Pipeline(network or model(3), loss or CrossEntropy(), mesh, **settings) as engine,
    ):
        engine.step(batch(0, 0, 4))


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"schedule": "1f1"}, ScheduleError, "no pipeline schedule '1f1'; did you mean 1f1b"),
        ({"schedule": "2bw", "micro_batches": 4}, ArgumentError, "has no flush"),
        ({"unused": "error"}, ArgumentError, "does not compare graphs"),
        ({"device": "cuda"}, ArgumentError, "on CPUs only"),
        ({"micro_batches": "4"}, ScheduleError, "'4' micro-batches; expected a whole number"),
        ({"micro_batches": 0}, ScheduleError, "2 stages and 0 micro-batches"),
        ({"micro_batches": 3}, ArgumentError, "4 micro-batches, for a pipeline of 3"),
        ({"cut": ["layer9"]}, ArgumentError, "expected the names of 1 layers in their order"),
        ({"schedule": "interleaved:3"}, ArgumentError, "needs at least 6 layers; the model has 3"),
        ({"loss": 3}, ArgumentError, "loss=3; expected a loss"),
    ],
)
def test_what_is_refused(settings, kind, text):
    def rank(comm):
        with pytest.raises(kind, match=text):
            make(comm, **{"micro_batches": 4, **settings})

    run_threads(2, rank)


def test_errors_of_layers_tell_stage_micro_batch_and_layer():
    def rank(comm):
        network = model(3)
        layers = [*network.layers[:2], ("odd", Faulty(8, 8, Key(3)))]
        with pytest.raises(CollError) as caught:
            make(comm, Sequential(layers), micro_batches=4, cut=["odd"])
        return str(caught.value)

    texts = run_threads(2, rank)
    assert texts[1].startswith("stage 1, B of micro-batch 0, chunk 1 (odd): no gradient today")
    assert "no gradient today" in texts[0]  # as the reason why its peer has left


def test_ranks_with_other_schedules_hear_of_it():
    def rank(comm):
        with pytest.raises(MismatchError, match="schedule="):
            make(comm, schedule=("gpipe", "1f1b")[comm.rank], micro_batches=4)

    run_threads(2, rank)


def test_a_pipeline_axis_without_a_pipeline():
    def rank(comm):
        with Mesh(comm, pp=2) as mesh, pytest.raises(ArgumentError, match="Pipeline takes pp"):
            DataParallel(model(), CrossEntropy(), mesh)

    run_threads(2, rank)


def test_a_dead_stage_is_lost_everywhere():
    def rank(comm):
        with (
            Mesh(comm, pp=3) as mesh,
            Pipeline(model(), CrossEntropy(), mesh, "1f1b", 4) as engine,
        ):
            engine.step(batch(0, 0, 4))
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(PeerLost, match="rank 1"):
                engine.step(batch(1, 0, 4))
            return time.monotonic() - start

    waits = run_processes(3, rank, may_die={1})
    assert max(waits[0], waits[2]) < 10  # nobody waits for a deadline


@pytest.mark.parametrize(
    ("sizes", "chunks", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([9, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 9], 2, [0, 3]),
        ([0, 0, 0, 0], 4, [0, 1, 2, 3]),
        ([5, 1, 1, 5, 1, 1], 3, [0, 2, 4]),
    ],
)
def test_cuts_are_balanced(sizes, chunks, expected):
    names = [f"l{i}" for i in range(len(sizes))]
    starts = cut_units(names, sizes, chunks, None)
    sums = [sum(sizes[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    best = [sum(sizes[a:b]) for a, b in zip(expected, [*expected[1:], None], strict=True)]
    assert max(sums) == max(best)
    assert len(starts) == chunks
    assert cut_units(names, sizes, chunks, [names[i] for i in expected[1:]]) == expected

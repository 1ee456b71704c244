"""Pipelines train to the bits of one process, with every schedule, ZeRO stage and mesh."""

import sys
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, CollError, MismatchError, ScheduleError
from pycoll.parallel import AdamW, DataParallel, Mesh, Pipeline
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential, TransformerConfig
from pycoll.parallel.pipeline.cuts import cut_units
from pycoll.parallel.random import Key
from pycoll.testing import run_processes, run_threads

SYNCHRONOUS = ("naive", "gpipe", "1f1b", "zb_h1", "interleaved:2", "zb_v", "dualpipe_v")
SETTINGS = {"optimizer": AdamW(lr=1e-2), "clip_norm": 0.5, "bucket_bytes": 600}


def model(depth=9):
    key = Key(0)
    layers = [Linear(8, 8, key.fold(str(i))) if i % 2 == 0 else ReLU() for i in range(depth)]
    return Sequential([(f"layer{i}", layer) for i, layer in enumerate(layers)])


def batch(step, place, m):
    rng = np.random.default_rng([step, place])
    return [(rng.standard_normal((5, 8)).astype("f4"), rng.integers(0, 8, 5)) for _ in range(m)]


def train(engine, place, m, steps):
    reports = [engine.step(batch(s, place, m)) for s in range(steps)]
    return [(r.loss, r.samples, r.grad_norm) for r in reports], engine.gather()


def plain(comm, zero, m, steps):
    with (
        Mesh(comm, dp=-1) as mesh,
        DataParallel(model(), CrossEntropy(), mesh, zero=zero, **SETTINGS) as engine,
    ):
        return train(engine, mesh.coordinate("dp"), m, steps)


def piped(comm, zero, m, steps, dp, pp, *schedules):
    """Return what each schedule makes of the same start."""
    found = []
    with Mesh(comm, dp=dp, pp=pp) as mesh:
        for schedule in schedules:
            more = {"micro_batches": m, "zero": zero, **SETTINGS}
            with Pipeline(model(), CrossEntropy(), mesh, schedule, **more) as engine:
                found.append(train(engine, mesh.coordinate("dp"), m, steps))
    return found


def same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name].tobytes() == value.tobytes(), name


MESHES = [(1, 2), (1, 4), (2, 2), (4, 2), (1, 1)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "pp"), MESHES)
def test_the_bits_are_those_of_one_process(dp, pp, zero):
    """Every ZeRO stage on every mesh; every schedule on every mesh, and with every ZeRO stage."""
    m, steps = 5, 2
    expected = run_threads(dp, plain, zero, m, steps)[0]
    chosen = SYNCHRONOUS[(MESHES.index((dp, pp)) + zero) % 4 :: 4]
    for each in run_threads(dp * pp, piped, zero, m, steps, dp, pp, *chosen):
        for found in each:
            same(found, expected)


def test_fifty_steps_in_processes():
    expected = run_threads(1, plain, 0, 8, 50)[0]
    for found in run_processes(2, piped, 1, 8, 50, 1, 2, "zb_h1"):
        same(found[0], expected)


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
    for ((_, found),) in run_threads(4, piped, 1, 4, 3, 2, 2, "1f1b"):
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
        for s in range(5):
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
        ({"schedule": "2bw", "clip_norm": 1.0}, ArgumentError, "no flush: .* clip_norm, for which"),
        ({"device": "cuda"}, ArgumentError, "on CPUs only"),
        ({"micro_batches": "4"}, ScheduleError, "'4' micro-batches; expected a whole number"),
        ({"micro_batches": 0}, ScheduleError, "2 stages and 0 micro-batches"),
        ({"micro_batches": 3}, ArgumentError, "4 micro-batches, for a pipeline of 3"),
        ({"cut": ["layer9"]}, ArgumentError, "expected the names of 1 layers in their order"),
        ({"cut": "evenly"}, ArgumentError, "cut='evenly'; accepted: parameters, time, a list"),
        (
            {"cut": "time"},
            ArgumentError,
            "cannot be timed: all ranks have sample: none: cut='time'",
        ),
        ({"schedule": "interleaved:3"}, ArgumentError, "needs at least 6 layers; the model has 3"),
        ({"loss": 3}, ArgumentError, "loss=3; expected a loss"),
    ],
)
def test_what_is_refused(settings, kind, text):
    def rank(comm):
        with pytest.raises(kind, match=text):
            make(comm, **{"micro_batches": 4, **settings})

    run_threads(2, rank)


class Odd(CrossEntropy):
    def forward(self, logits, targets):
        raise ValueError("no loss today")


def failing(comm, *parts, **settings):
    """Return the error of a step on each rank, with its notes."""
    with pytest.raises((CollError, ValueError)) as caught:
        make(comm, *parts, micro_batches=4, **settings)
    notes = getattr(caught.value, "__notes__", [])
    return type(caught.value), str(caught.value), "\n".join(notes)


def test_errors_of_layers_tell_stage_micro_batch_and_layer():
    network = model(3)
    layers = [*network.layers[:2], ("fine", ReLU()), ("odd", Faulty(8, 8, Key(3)))]
    cut = {"cut": ["fine"]}
    found = run_threads(2, lambda comm: failing(comm, Sequential(layers), **cut))
    assert found[1][1] == "stage 1, B of micro-batch 0, chunk 1, layer odd: no gradient today"
    assert "no gradient today" in found[0][1]  # as the reason why its peer has left
    place = "RECV of dx of micro-batch 0, chunk 1, layer fine, from stage 1"
    assert sys.version_info < (3, 11) or f"in the pipeline: stage 0, {place}" in found[0][2]


def test_errors_of_the_loss_tell_where_they_come_from():
    found = run_threads(2, lambda comm: failing(comm, None, Odd()))
    assert found[1][:2] == (ValueError, "no loss today")
    place = "stage 1, F of micro-batch 0, chunk 1, layer loss"
    assert sys.version_info < (3, 11) or place in found[1][2]


class Moody(Linear):
    """Has no gradient for its bias where the input is all zeros."""

    def backward_weight(self, params, saved, dy):
        found = super().backward_weight(params, saved, dy)
        return found if saved.any() else {"weight": found["weight"]}


def test_a_changed_graph_is_an_error_on_all_ranks():
    def rank(comm, unused):
        layers = [("moody", Moody(8, 8, Key(3))), *model(3).layers]
        with (
            Mesh(comm, pp=2) as mesh,
            Pipeline(Sequential(layers), CrossEntropy(), mesh, "gpipe", 2, unused=unused) as engine,
        ):
            good, (x, y) = batch(0, 0, 2), batch(0, 0, 1)[0]
            engine.step(good)
            if unused == "error":
                text = "rank 0 has a changed graph: in micro-batch 1 gradients of moody.bias"
                with pytest.raises(ArgumentError, match=text):
                    engine.step([(x, y), (0 * x, y)])
            return engine.step(good).loss

    assert len(set(run_threads(2, rank, "error") + run_threads(2, rank, "zero"))) == 1


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
    starts = cut_units(names, sizes, chunks, "parameters")
    sums = [sum(sizes[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    best = [sum(sizes[a:b]) for a, b in zip(expected, [*expected[1:], None], strict=True)]
    assert max(sums) == max(best)
    assert len(starts) == chunks
    assert cut_units(names, sizes, chunks, [names[i] for i in expected[1:]]) == expected


class Slow(ReLU):
    """Takes its time, more of it on one rank."""

    def __init__(self, seconds):
        self.seconds = seconds

    def forward(self, params, x):
        time.sleep(self.seconds)
        return super().forward(params, x)


def test_a_cut_by_time_is_the_same_on_all_ranks():
    def rank(comm):
        slow = [0.001, 0.001, 0.02 + 0.01 * (comm.rank == 1), 0.001]
        layers = [*model(1).layers, *((f"slow{i}", Slow(s)) for i, s in enumerate(slow))]
        more = {"micro_batches": 2, "cut": "time", "sample": batch(0, 0, 1)[0]}
        with (
            Mesh(comm, pp=3) as mesh,
            Pipeline(Sequential(layers), CrossEntropy(), mesh, **more) as engine,
        ):
            engine.step(batch(0, 0, 2))
            return engine.cuts

    cuts = run_threads(3, rank)
    assert cuts[0] == cuts[1] == cuts[2]
    assert ("slow2",) in cuts[0]


def test_a_stage_without_parameters():
    def rank(comm, pp, cut):
        layers = [*model(1).layers, ("relu1", ReLU()), ("relu2", ReLU())]
        more = {"micro_batches": 2, "cut": cut, "offload": "all"}
        with (
            Mesh(comm, pp=pp) as mesh,
            Pipeline(Sequential(layers), CrossEntropy(), mesh, **more) as engine,
        ):
            return train(engine, 0, 2, 3)

    expected = run_threads(1, rank, 1, [])[0]
    for found in run_threads(3, rank, 3, ["relu1", "relu2"]):
        same(found, expected)

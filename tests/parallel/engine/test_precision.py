"""16-bit training: recipes, master weights, and a loss scale that all ranks agree on."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from parallel.engine.test_data_parallel import digest
from parallel.models import CrossEntropy, Linear, batches, mlp, values
from pycoll.errors import ArgumentError
from pycoll.parallel import (
    SGD,
    DataParallel,
    LossScale,
    Mesh,
    ParameterSpec,
    Sequential,
    load,
    save,
)
from pycoll.parallel.precision import RECIPES, cast, dtype_of, recipe
from pycoll.testing import run_threads

BYTES = {"fp32": 16, "fp64": 32, "fp16": 16, "bf16": 18, "fp16_copy": 20}


def bytes_of(name):
    """Return the bytes of a parameter, its gradient, and its state of two moments."""
    recipe = RECIPES[name]
    states = 2 + recipe.master + recipe.gradient_copy
    kinds = (recipe.parameter, 1), (recipe.gradient, 1), (recipe.state, states)
    return [dtype_of(kind).itemsize * times for kind, times in kinds]


@pytest.mark.parametrize(("name", "nbytes"), BYTES.items())
def test_bytes_per_parameter(name, nbytes):
    assert sum(bytes_of(name)) == nbytes


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("zero", range(4))
def test_recipes_cost_what_they_say_and_learn(name, zero):
    def rank(comm):
        options = {"precision": name, "zero": zero, "loss_scale": LossScale(256.0)}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        kind = np.float64 if name == "fp64" else np.float32
        losses = []
        for _ in range(30):
            (x, t), own = batches(2), comm.rank
            losses.append(
                engine.step([((x, t)[own][0].astype(kind), (x, t)[own][1])], lr=0.02).loss
            )
        seen = {bucket.parameter.data.dtype for bucket in engine.buckets}
        padded = sum(bucket.layout.padded for bucket in engine.buckets)
        found = engine.gather(), engine.state_dict()
        return losses, seen, +engine.ledger.live, padded, found

    for losses, seen, live, padded, (low, saved) in run_threads(2, rank):
        assert losses[-1] < 0.75 * losses[0]
        assert seen == {dtype_of(RECIPES[name].parameter)}
        kinds = zip(("parameter", "gradient", "optimizer"), (3, 2, 1), strict=True)
        for (kind, stage), each in zip(kinds, bytes_of(name), strict=True):
            assert live[kind] == padded * each // (2 if zero >= stage else 1)
        for full, value in low.items():
            np.testing.assert_array_equal(value, saved["parameters"][full].astype(value.dtype))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp16_copy"])
def test_every_stage_has_the_same_bits(name):
    def rank(comm, zero):
        options = {"precision": name, "zero": zero, "clip_norm": 0.3, "order": "rank"}
        options["loss_scale"] = LossScale(256.0)
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=3), **options)
        for step in range(10):
            report = engine.step([batches(3, seed=step)[comm.rank]])
        return digest(engine.gather()), report.grad_norm

    found = [run_threads(3, rank, zero) for zero in range(4)]
    assert found == [found[0][:1] * 3] * 4


@pytest.mark.parametrize("axes", [{"replica": 2, "dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("zero", range(4))
def test_an_overflow_anywhere_in_a_mesh_is_an_overflow_everywhere(zero, axes):
    """One rank of four sees it; on a mesh with tp not even the one that has the same samples."""

    def rank(comm):
        options = {"precision": "fp16", "zero": zero, "loss_scale": LossScale(2.0**10)}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, **axes), **options)
        x, t = batches(1)[0]
        bad = np.full_like(x, np.inf) if comm.rank == 3 else x
        before = digest(engine.gather())
        with np.errstate(invalid="ignore"):
            skipped = engine.step([(bad, t)]).skipped
        same = digest(engine.gather()) == before
        return skipped, same, engine.loss_scale.value, engine.step([(x, t)]).skipped

    assert run_threads(4, rank) == [(True, True, 512.0, False)] * 4


@pytest.mark.parametrize("zero", range(4))
def test_an_overflow_on_one_rank_is_an_overflow_on_all(zero):
    def rank(comm):
        scale = LossScale(2.0**10, interval=2)
        options = {"precision": "fp16", "zero": zero, "loss_scale": scale}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        log = []
        for step in range(6):
            x, t = batches(2, seed=step)[comm.rank]
            if step == 3 and comm.rank == 1:
                x = np.full_like(x, np.inf)
            before = digest(engine.gather())
            with np.errstate(invalid="ignore"):
                report = engine.step([(x, t)])
            log.append((report.skipped, report.loss_scale, before == digest(engine.gather())))
        return log, engine.loss_scale.value, engine.steps, digest(engine.gather())

    first, second = run_threads(2, rank)
    assert first == second
    log, scale, steps, _ = first
    assert [skipped for skipped, _, _ in log] == [False, False, False, True, False, False]
    assert [same for _, _, same in log] == [False, False, False, True, False, False]
    assert [value for _, value, _ in log] == [1024, 1024, 2048, 2048, 1024, 1024]
    assert (scale, steps) == (2048, 5)


def test_a_scaled_loss_gives_the_gradient_of_the_loss():
    def rank(comm, scale):
        options = {"loss_scale": LossScale(scale), "optimizer": SGD(0.1)}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        report = engine.step([batches(2)[comm.rank]])
        return digest(engine.gather()), report.grad_norm, report.loss

    assert run_threads(2, rank, 1.0) == run_threads(2, rank, 2.0**14)
    assert run_threads(2, rank, 1.0) == run_threads(2, rank, 2.0**-9)  # less than 1 / samples


def test_small_gradients_survive_only_with_a_scale():
    """Gradients of 2**-27 vanish in float16, and come through with a scale of 2**12."""

    class Faint(Linear):
        def parameters(self):
            return {"weight": ParameterSpec((4, 4), init=values(1))}

        def forward(self, params, x):
            return x @ params["weight"], x

        def backward_weight(self, params, saved, dy):
            return {"weight": (saved.T.astype(np.float32) @ dy.astype(np.float32)) * 2.0**-27}

    def rank(comm, scale):
        engine = DataParallel(
            Sequential([("a", Faint(4, 4, 0))]),
            CrossEntropy(),
            Mesh(comm, dp=2),
            precision="fp16",
            loss_scale=LossScale(scale),
        )
        return engine.step(batches(1, sizes=(4, 4))).grad_norm

    lost, kept = run_threads(2, rank, 1.0)[0], run_threads(2, rank, 2.0**12)[0]
    assert lost < kept / 2
    assert 0 < kept < 2.0**-22


def test_loss_scale_follows_its_rule():
    scale = LossScale(8.0, interval=3)
    for overflow, value in [
        (0, 8),
        (0, 8),
        (0, 16),
        (1, 8),
        (0, 8),
        (1, 4),
        (0, 4),
        (0, 4),
        (0, 8),
    ]:
        scale = scale.after(bool(overflow))
        assert scale.value == value


def test_casts_leave_integers_alone():
    tokens = np.arange(3)
    assert cast(tokens, "float16") is tokens
    assert cast(np.ones(2), "").dtype == np.float64
    assert cast(np.ones(2, ml_dtypes.bfloat16), "float32").dtype == np.float32
    with pytest.raises(ArgumentError, match="accepted: fp32, fp64, fp16, bf16, fp16_copy"):
        recipe("fp8")


@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_a_scale_is_taken_only_between_engines_that_scale(tmp_path, way):
    def moved(source, target):
        if way == "state_dict":
            target.load_state_dict(source.state_dict())
        else:
            save(tmp_path, source)
            load(tmp_path, target)
        return target.loss_scale

    def rank(comm):
        def engine(precision, scale=None):
            mesh, options = Mesh(comm, dp=-1), {"precision": precision, "loss_scale": scale}
            return DataParallel(mlp(), CrossEntropy(), mesh, **options)

        fresh = engine("fp16").loss_scale
        fixed = LossScale(64.0, growth=1, backoff=1)
        assert moved(engine("fp32"), engine("fp16")) == fresh
        assert moved(engine("fp16"), engine("fp32")).value == 1.0
        assert moved(engine("fp16", LossScale(8.0)), engine("fp16")) == replace(fresh, value=8.0)
        return moved(engine("fp16", LossScale(8.0)), engine("fp16", fixed)) == fixed

    assert run_threads(2, rank) == [True, True]

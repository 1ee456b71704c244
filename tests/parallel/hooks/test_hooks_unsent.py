"""What compressing hooks remember: over skipped steps, of other buckets, and of empty ones."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest

from parallel.models import CrossEntropy, Linear, batches, mlp
from pycoll.parallel import (
    SGD,
    DataParallel,
    LossScale,
    Mesh,
    ParameterSpec,
    PowerSGD,
    Sequential,
    TopK,
    load,
    save,
)
from pycoll.testing import RankFailed, run_threads


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
@pytest.mark.parametrize("change", [{"bucket_bytes": 25 << 20}, {"precision": "fp64"}])
def test_what_is_unsent_of_other_buckets_is_refused(make, change):
    def rank(comm):
        options = {"bucket_bytes": 600, "hook": make()}
        first = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        first.step(batches(1))
        options |= {**change, "hook": make()}
        second = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        second.load_state_dict(first.state_dict())
        second.step(batches(1))

    with pytest.raises(RankFailed, match=r"ArgumentError.* was given float32.* as what is unsent"):
        run_threads(2, rank)


@pytest.mark.parametrize(
    ("change", "warns"),
    [
        ({"bucket_bytes": 25 << 20}, False),
        ({"precision": "fp64"}, False),
        ({"hook": PowerSGD(2)}, True),
        ({"hook": TopK(0.1)}, True),
    ],
)
def test_a_checkpoint_loads_without_what_is_unsent_of_other_buckets_or_hooks(
    tmp_path, change, warns
):
    """As on another mesh; with the same settings it comes back."""

    def rank(comm):
        options = {"bucket_bytes": 600, "hook": PowerSGD(1)}
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options) as engine:
            engine.step([batches(2)[comm.rank]])
            save(tmp_path, engine)
            load(tmp_path, engine)
            assert engine.hook.state()
        options |= {key: copy.deepcopy(value) for key, value in change.items()}
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options) as engine:
            load(tmp_path, engine)
            assert (engine.steps, engine.hook.state()) == (1, {})
            engine.step([batches(2)[comm.rank]])

    told = pytest.warns(RuntimeWarning, match="not sent is left out: all ranks have")
    with told if warns else nullcontext():
        run_threads(2, rank)


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_a_step_that_is_skipped_changes_nothing(make, zero):
    def train(comm, bad):
        options = {"hook": make(), "nonfinite": "skip", "zero": zero}
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)
        for seed in (1, 0, 2, 3) if bad else (1, 2, 3):
            x, t = batches(2, sizes=(20, 5), seed=seed)[comm.rank]
            if (comm.rank, seed) == (1, 0):
                x[:] = np.nan
            with np.errstate(invalid="ignore"):
                assert engine.step([(x, t)]).skipped == (seed == 0)
        return engine.gather()

    for found, expected in zip(
        run_threads(2, train, True), run_threads(2, train, False), strict=True
    ):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_what_is_unsent_follows_the_loss_scale(make):
    def train(comm, loss_scale):
        options = {"hook": make(), "loss_scale": loss_scale}
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)
        scales = []
        for seed in range(4):
            batch = batches(2, sizes=(20, 5), seed=seed)[comm.rank]
            scales.append(engine.step([batch]).loss_scale)
        return scales, engine.gather()

    growing = run_threads(2, train, LossScale(0.25, growth=4.0, interval=1))
    for (scales, found), (_, expected) in zip(growing, run_threads(2, train, None), strict=True):
        assert scales == [0.25, 1.0, 4.0, 16.0]
        for name, value in expected.items():  # powers of two change no digit
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("make", [lambda: TopK(0.02), lambda: PowerSGD(1)])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_scale_that_grows_until_gradients_overflow_stops_nothing(make, zero):
    """What is unsent is larger than gradients are, and overflows first."""

    def train(comm):
        options = {"hook": make(), "loss_scale": LossScale(2.0**112, interval=1), "zero": zero}
        options["optimizer"] = SGD(0.01)
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)
        skipped = []
        for seed in range(48):
            batch = batches(2, sizes=(20, 5), seed=seed)[comm.rank]
            with np.errstate(over="ignore", invalid="ignore"):
                skipped.append(engine.step([batch]).skipped)
            kept = engine.state_dict()["hook"].values()
            assert all(np.isfinite(array).all() for array in kept)
        assert not any(skipped[:10])
        assert any(skipped)
        assert not all(skipped[-10:])

    run_threads(2, train)


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1), lambda: None])
def test_parameters_without_elements(make):
    class Nothing(Linear):
        def parameters(self):
            return {"weight": ParameterSpec((0, 3))}

        def forward(self, params, x):
            return x, x

        def backward_input(self, params, saved, dy):
            return dy

        def backward_weight(self, params, saved, dy):
            return {"weight": np.zeros((0, 3), np.float32)}

    def rank(comm, layers):
        model = Sequential([*mlp().layers, *layers])
        options = {"hook": make(), "bucket_bytes": 4}
        engine = DataParallel(model, CrossEntropy(), Mesh(comm, dp=2), **options)
        return engine.step([batches(2)[comm.rank]]).grad_norm

    nothing = [("nothing", Nothing(0, 3, 0))]
    assert run_threads(2, rank, nothing) == run_threads(2, rank, [])

"""What compressing hooks keep of a step counts once all ranks of the mesh take it."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import (
    SGD,
    DataParallel,
    LossScale,
    Mesh,
    ParameterSpec,
    PowerSGD,
    Sequential,
    TopK,
)
from pycoll.parallel.nn import Linear
from pycoll.parallel.random import Key
from pycoll.testing import RankFailed, run_processes, run_threads

HOOKS = [lambda: TopK(0.2), lambda: PowerSGD(1)]
SHAPE = (12, 9)


class Given:
    """A layer whose gradient a test gives."""

    gradient = np.zeros(SHAPE, np.float32)

    def __init__(self, axis=None):
        self.axis = axis

    def parameters(self):
        return {"weight": ParameterSpec(SHAPE, tensor_axis=self.axis)}

    def forward(self, params, x):
        return x, None

    def backward_input(self, params, saved, dy):
        return dy

    def backward_weight(self, params, saved, dy):
        return {"weight": self.gradient}


class Nothing:
    """A loss."""

    def forward(self, x, target):
        return 0.0, 1, None

    def backward(self, saved, scale):
        return np.zeros((1, 1), np.float32)


def drawn(*seed):
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("make", HOOKS)
def test_an_overflow_in_one_part_of_a_layer_leaves_what_all_have_alike(make, zero):
    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        whole, split = Given(), Given(0)
        options = {"hook": make(), "zero": zero, "optimizer": SGD(0.1), "loss_scale": LossScale(4)}
        model = Sequential([("whole", whole), ("split", split)])
        engine, skipped = DataParallel(model, Nothing(), mesh, **options), []
        for step in range(5):
            whole.gradient = drawn(step, mesh.dp.rank)
            split.gradient = drawn(step, mesh.dp.rank, 1 + mesh.tp.rank)
            if step == 2 and comm.rank == 1:
                split.gradient[0, 0] = np.inf
            with np.errstate(invalid="ignore"):
                report = engine.step([(np.zeros((1, 1), np.float32), 0)])
            skipped.append(report.skipped)
        return skipped, engine.gather()["whole.weight"]

    found = run_threads(4, rank)
    for skipped, weight in found:
        assert skipped == [False, False, True, False, False]
        np.testing.assert_array_equal(weight, found[0][1])


@pytest.mark.parametrize(("why", "zero"), [("rate", 0), ("rate", 2), ("later", 0), ("later", 2)])
@pytest.mark.parametrize("make", HOOKS)
def test_a_step_that_is_not_taken_changes_nothing(make, why, zero):
    def rank(comm):
        options = {"hook": make(), "zero": zero, "nonfinite": "skip", "bucket_bytes": 1000}
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)

        def batch(seed):
            return batches(2, sizes=(20, 5), seed=seed)[comm.rank]

        engine.step([batch(0)])
        before = engine.state_dict()["hook"]
        assert before
        if why == "rate":
            with pytest.raises(MismatchError):
                engine.step([batch(1)], lr=0.1 + comm.rank)
        else:
            x, target = batch(2)
            bad = np.full_like(x, np.nan if comm.rank else 1)
            with np.errstate(invalid="ignore"):
                assert engine.step([batch(1), (bad, target)]).skipped
        after = engine.state_dict()["hook"]
        assert after.keys() == before.keys()
        return all(np.array_equal(after[name], x) for name, x in before.items())

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("make", HOOKS)
def test_what_is_unsent_follows_a_scale_that_the_program_sets(make):
    def train(comm, scales):
        options = {"hook": make(), "loss_scale": LossScale(1.0, growth=1.0)}
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)
        for seed, scale in enumerate(scales):
            engine.loss_scale = LossScale(scale, growth=1.0)
            engine.step([batches(2, sizes=(20, 5), seed=seed)[comm.rank]])
        return engine.gather()

    changing = run_threads(2, train, [1.0, 8.0, 0.5, 2.0])
    for found, expected in zip(changing, run_threads(2, train, [1.0] * 4), strict=True):
        for name, value in expected.items():  # powers of two change no digit
            np.testing.assert_array_equal(found[name], value)


def test_powersgd_gives_ranks_with_other_numbers_of_threads_the_same_bits():
    def rank(comm):
        with threadpool_limits(1 + comm.rank):
            layers = [("a", Linear(700, 900, Key(0).fold("a"))), ("b", Linear(900, 50, Key(1)))]
            options = {"hook": PowerSGD(8), "optimizer": SGD(0.1)}
            mesh = Mesh(comm, dp=-1)
            engine = DataParallel(Sequential(layers), CrossEntropy(), mesh, **options)
            for step in range(3):
                rng = np.random.default_rng([step, comm.rank])
                x = rng.standard_normal((64, 700)).astype(np.float32)
                engine.step([(x, rng.integers(0, 50, 64))])
            return engine.gather()

    first, second = run_processes(2, rank, timeout=60)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def test_powersgd_of_gradients_that_are_zero_at_first():
    def rank(comm):
        layer = Given()
        options = {"hook": PowerSGD(2), "optimizer": SGD(1.0)}
        engine = DataParallel(Sequential([("a", layer)]), Nothing(), Mesh(comm, dp=-1), **options)
        before = engine.gather()["a.weight"].copy()
        outer = np.outer(np.arange(12.0), np.ones(9)).astype(np.float32)
        for gradient in (np.zeros(SHAPE, np.float32), outer, outer):
            layer.gradient = gradient
            engine.step([(np.zeros((1, 1), np.float32), 0)])
        return before - engine.gather()["a.weight"], 2 * outer

    for found, expected in run_threads(2, rank):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: PowerSGD(1), lambda: PowerSGD(2)),
        (lambda: TopK(0.1), lambda: PowerSGD(1)),
        (lambda: PowerSGD(1), lambda: TopK(0.1)),
    ],
)
def test_the_state_of_another_hook_is_refused(first, second):
    def rank(comm):
        engines = [
            DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), hook=make())
            for make in (first, second)
        ]
        engines[0].step([batches(2, sizes=(20, 5))[comm.rank]])
        engines[1].load_state_dict(engines[0].state_dict())

    with pytest.raises(RankFailed, match=r"the saved state was not loaded.*state that"):
        run_threads(2, rank)


@pytest.mark.parametrize("start", [2.0**-3, 2.0, 8.0])
def test_a_scale_that_cannot_fall_any_more_is_an_error(start):
    def rank(comm):
        options = {"loss_scale": LossScale(start, minimum=2.0**-2), "optimizer": SGD(0.1)}
        engine = DataParallel(mlp((20, 20, 5)), CrossEntropy(), Mesh(comm, dp=2), **options)
        x, target = batches(2, sizes=(20, 5))[comm.rank]
        bad, scales = [(np.full_like(x, np.inf), target)], []
        with np.errstate(invalid="ignore"):
            for _ in range(20):
                try:
                    scales.append(engine.step(bad).loss_scale)
                except ArgumentError as error:
                    return scales, str(error)
        return scales, ""

    for scales, told in run_threads(2, rank):
        falling = [start / 2**k for k in range(10) if start / 2**k > 0.25]
        assert scales == falling
        assert "not finite" in told
        assert "ranks" in told or "rank 0" in told


def test_a_scale_whose_inverse_is_no_number_is_refused():
    with pytest.raises(ArgumentError, match="value=1e-40"):
        LossScale(1e-40)

"""Data-parallel training of arrays on a device, its kernels compiled for the host."""

import numpy as np
import pytest

from cuda.host_cupy import DeviceArray
from parallel.gpt_training import train
from pycoll.config import Config
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import (
    AdamW,
    Compress,
    DataParallel,
    LossScale,
    Mesh,
    Options,
    PowerSGD,
    Sequential,
    TopK,
)
from pycoll.parallel.nn import Linear
from pycoll.parallel.nn.losses import CrossEntropy
from pycoll.parallel.random import Key
from pycoll.testing import run_threads

WORLD = Config(timeout_s=20, heap_bytes=1 << 28, device_heap_bytes=1 << 20)
STEPS = 3


def everywhere(n, axes, device, **options):
    """Train a GPT on n ranks; return losses, norms and parameters of each."""

    def rank(comm):
        return train(comm, axes, steps=STEPS, device=device, **options)

    return run_threads(n, rank, config=WORLD, timeout=120)


def same(mine, other):
    """Whether two runs have the same bits."""
    losses, norms, values = mine
    return (losses, norms) == other[:2] and all(
        np.array_equal(values[name], other[2][name]) for name in values
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_it_trains_what_one_device_trains(host_kernels, zero):
    (alone,) = everywhere(1, {}, "cuda", zero=zero)
    runs = everywhere(2, {"dp": 2}, "cuda", zero=zero, bucket_bytes=4000)
    assert same(*runs)
    assert zero > 1 or same(runs[0], alone)  # stages 2 and 3 have a nesting of sums of their own
    ((losses, norms, values),) = everywhere(1, {}, "cpu", zero=zero)
    assert alone[0] == pytest.approx(losses, rel=1e-5)
    assert alone[1] == pytest.approx(norms, rel=1e-5)
    for name, value in values.items():
        assert isinstance(alone[2][name], np.ndarray)
        np.testing.assert_allclose(alone[2][name], value, rtol=1e-4, atol=1e-6)
    assert len(host_kernels.launches) > 0


@pytest.mark.parametrize("axes", [{"replica": 2, "dp": 2}, {"dp": 2, "tp": 2}])
def test_other_meshes(host_kernels, axes):
    runs = everywhere(4, axes, "cuda", zero=1, sequence_parallel="tp" in axes)
    want = everywhere(4, axes, "cpu", zero=1, sequence_parallel="tp" in axes)
    assert all(same(run, runs[0]) for run in runs)
    for name, value in want[0][2].items():
        np.testing.assert_allclose(runs[0][2][name], value, rtol=1e-4, atol=1e-6)


def small(mesh, device="cuda", **options):
    """Make an engine for a linear model."""
    kind = "float64" if options.get("precision") == "fp64" else "float32"
    model = Sequential([("linear", Linear(5, 3, Key(4), dtype=kind))])
    return DataParallel(model, CrossEntropy(), mesh, device=device, **options)


def batch(rank, step, library=np.asarray):
    rng = np.random.default_rng([rank, step])
    x, targets = rng.standard_normal((8, 5), np.float32), rng.integers(0, 3, 8)
    return [(library(x), library(targets))]


def steps(comm, device, library=np.asarray, count=STEPS, **options):
    with Mesh(comm, dp=-1) as mesh, small(mesh, device, **options) as engine:
        reports = [engine.step(batch(comm.rank, step, library)) for step in range(count)]
        return engine.gather(), engine.state_dict(), reports


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": AdamW(lr=1e-2), "clip_norm": 0.1},
        {"precision": "fp16", "loss_scale": LossScale(2.0**10)},
        {"precision": "fp16_copy", "loss_scale": LossScale(2.0**8)},
        {"precision": "fp64", "zero": 3},
        {"hook": Compress("float16"), "zero": 2},
        {"fused": False},
    ],
    ids=lambda options: " ".join(options),
)
def test_the_bits_are_those_of_the_cpu(host_kernels, options):
    """One layer, whose products and sums are the same functions here."""
    there = run_threads(2, lambda comm: steps(comm, "cuda", **options), config=WORLD)
    here = run_threads(2, lambda comm: steps(comm, "cpu", **options), config=WORLD)
    for (mine, state, reports), (values, saved, told) in zip(there, here, strict=True):
        for name, value in values.items():
            np.testing.assert_array_equal(mine[name], value)
        for kind in ("parameters", "first_moment", "second_moment"):
            for name, value in saved[kind].items():
                np.testing.assert_array_equal(state[kind][name], value)
        assert [r.grad_norm for r in reports] == [r.grad_norm for r in told]
        assert [r.bytes for r in reports] == [r.bytes for r in told]


def test_batches_may_be_on_the_device(host_kernels):
    def rank(comm):
        return steps(comm, "cuda")[0], steps(comm, "cuda", DeviceArray)[0]

    for mine, other in run_threads(2, rank, config=WORLD):
        np.testing.assert_array_equal(mine["linear.weight"], other["linear.weight"])


def test_a_state_moves_between_devices(host_kernels):
    """A run that goes on elsewhere ends as one that stays."""

    def rank(comm):
        whole, _, _ = steps(comm, "cpu")
        _, saved, _ = steps(comm, "cuda", count=1)
        with Mesh(comm, dp=-1) as mesh, small(mesh, "cpu", zero=1) as engine:
            engine.load_state_dict(saved)
            engine.step(batch(comm.rank, 1))
            saved = engine.state_dict()
        with Mesh(comm, dp=-1) as mesh, small(mesh, "cuda", zero=3) as engine:
            engine.load_state_dict(saved)
            engine.step(batch(comm.rank, 2))
            return whole, engine.gather()

    for whole, found in run_threads(2, rank, config=WORLD):
        for name, value in whole.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_gradient_that_is_not_finite(host_kernels):
    def rank(comm):
        with Mesh(comm, dp=-1) as mesh, small(mesh) as engine:
            before = engine.gather()
            ((x, y),) = batch(comm.rank, 0)
            x[0, 0] = np.inf if comm.rank else 1
            with pytest.raises(ArgumentError, match=r"rank 1 has gradients that .* linear\.weight"):
                engine.step([(x, y)])
            engine.step(batch(comm.rank, 1))
            return before, engine.gather()

    for before, after in run_threads(2, rank, config=WORLD):
        assert np.isfinite(after["linear.weight"]).all()
        assert not np.array_equal(before["linear.weight"], after["linear.weight"])


def test_gradients_and_arrays_are_the_devices(host_kernels):
    def rank(comm):
        with Mesh(comm, dp=-1) as mesh, small(mesh) as engine:
            engine.step(batch(comm.rank, 0))
            kinds = {type(value) for value in engine.gradients().values()}
            bucket = engine.buckets[0]
            kinds |= {type(bucket.parameter.data), *map(type, bucket.slots.values())}
            return kinds, type(engine.predict(batch(0, 0)[0][0]))

    assert run_threads(2, rank, config=WORLD) == [({DeviceArray}, DeviceArray)] * 2


def test_ranks_on_different_devices(host_kernels):
    def rank(comm):
        with Mesh(comm, dp=-1) as mesh, pytest.raises(MismatchError, match="rank 1: device='cuda'"):
            small(mesh, "cuda" if comm.rank else "cpu")

    run_threads(2, rank, config=WORLD)


@pytest.mark.parametrize("hook", [TopK(0.1), PowerSGD(1)])
def test_hooks_for_the_cpu(hook):
    with pytest.raises(ArgumentError, match="is for device=cpu, not cuda"):
        Options(hook=hook, device="cuda")


def test_an_unknown_device():
    with pytest.raises(ArgumentError, match="device='tpu' is not known; accepted: cpu, cuda"):
        Options(device="tpu")


def test_the_stage_of_the_gpu_suite(gpu, host_kernels, tmp_path):
    """With threads for processes."""
    gpu("rows"), gpu("common")
    training, writer = gpu("training"), gpu("rows").Writer(tmp_path / "rows.jsonl", "train2")

    def rank(comm):
        for zero in range(4):
            training.compare(comm, writer, zero)

    run_threads(2, rank, config=WORLD, timeout=120)
    written = gpu("rows").read(tmp_path / "rows.jsonl")
    assert [row["zero"] for row in written] == [0, 1, 2, 3]
    assert all(row["ok"] for row in written)

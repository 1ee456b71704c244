"""Compressed gradients against a simulation of all ranks in one process."""

import zlib

import ml_dtypes
import numpy as np
import pytest

from parallel import serial
from parallel.models import CrossEntropy, batches, mlp
from pycoll.parallel import (
    SGD,
    AdamW,
    Compress,
    DataParallel,
    Mesh,
    ParameterSpec,
    PowerSGD,
    Sequential,
    TopK,
)
from pycoll.testing import RankFailed, run_threads

N, STEPS, LR = 3, 20, 0.1
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def train(comm, make, steps=STEPS, **options):
    options = {"optimizer": SGD(LR), "order": "rank", "bucket_bytes": 600, **options}
    engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), hook=make(), **options)
    reports = [engine.step([batches(N, seed=s)[comm.rank]]) for s in range(steps)]
    buckets = [
        {e.parameter.name: (e.start, e.stop) for e in b.layout.entries} for b in engine.buckets
    ]
    return engine.gather(), reports[-1], buckets, engine


def simulate(buckets, combine, steps=STEPS):
    """Train N ranks in one process; `combine` makes one bucket's sum out of N flat gradients."""
    model, loss = mlp(), CrossEntropy()
    params, optimizer = serial.first_values(model), serial.SGD(LR, 0.0)
    for step in range(steps):
        parts = [serial.gradients(model, loss, params, s) for s in batches(N, seed=step)]
        total = {}
        for bucket in buckets:
            flat = [np.concatenate([p[2][name].ravel() for name in bucket]) for p in parts]
            summed = combine(next(iter(bucket)), bucket, flat)
            for name, (start, stop) in bucket.items():
                total[name] = summed[start:stop].reshape(params[name].shape)
        optimizer.step(params, total, 1 / sum(p[1] for p in parts), serial.no_decay(model))
    return params


def compare(found, expected, **tolerance):
    for name, value in expected.items():
        for rank in found:
            np.testing.assert_allclose(rank[0][name], value, err_msg=name, **tolerance)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("zero", range(4))
def test_sixteen_bits_halve_the_gradient_bytes(name, zero):
    found = run_threads(N, lambda c: train(c, lambda: Compress(name), zero=zero)[:3])
    plain = run_threads(N, lambda c: train(c, lambda: None, 1, zero=zero)[:3])
    assert found[0][1].bytes["gradient"] * 2 == plain[0][1].bytes["gradient"]

    def combine(key, bucket, flat):
        small = [(f / np.float32(N)).astype(TYPES[name]).astype(np.float32) for f in flat]
        return serial.left(small).astype(TYPES[name]).astype(np.float32) * np.float32(N)

    compare(found, simulate(found[0][2], combine), rtol=0)


@pytest.mark.parametrize(("ratio", "zero"), [(0.05, 0), (0.05, 1), (0.05, 2), (1.0, 0)])
def test_top_k_sends_the_largest_and_keeps_the_rest(ratio, zero):
    found = run_threads(N, lambda c: train(c, lambda: TopK(ratio), zero=zero)[:3])
    errors = {}

    def combine(key, bucket, flat):
        total = np.zeros_like(flat[0])
        for rank, gradient in enumerate(flat):
            whole = gradient + errors.get((key, rank), np.float32(0))
            k = int(np.ceil(ratio * whole.size))
            sent = np.argsort(-np.abs(whole), kind="stable")[:k]
            total[sent] += whole[sent]
            whole[sent] = 0
            errors[key, rank] = whole
        return total

    expected = simulate(found[0][2], combine)
    compare(found, expected, rtol=0)
    sizes = [sum(stop - start for start, stop in b.values()) for b in found[0][2]]
    pairs = sum(int(np.ceil(ratio * size)) for size in sizes)
    assert found[0][1].bytes["gradient"] == (N - 1) * pairs * 8


@pytest.mark.parametrize(("rank", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_powersgd_against_the_algorithm_of_the_paper(rank, zero):
    found = run_threads(N, lambda c: train(c, lambda: PowerSGD(rank), zero=zero)[:3])
    shapes = {name: p.shape for name, p in serial.first_values(mlp()).items()}
    errors, bases = {}, {}

    def combine(key, bucket, flat):
        total = serial.left(flat)
        for name, (start, stop) in bucket.items():
            shape = shapes[name]
            if len(shape) < 2 or rank * sum(shape) >= np.prod(shape):
                continue
            if name not in bases:
                rng = np.random.default_rng(zlib.crc32(name.encode()))
                bases[name] = rng.standard_normal((shape[1], rank)).astype(np.float32)
            m = [
                f[start:stop].reshape(shape) + errors.get((name, r), 0) for r, f in enumerate(flat)
            ]
            p, _ = np.linalg.qr(sum(x @ bases[name] for x in m))
            q = [x.T @ p for x in m]
            for r in range(N):
                errors[name, r] = m[r] - p @ q[r].T
            bases[name] = sum(q) / N
            total[start:stop] = (p @ sum(q).T).ravel()
        return total

    compare(found, simulate(found[0][2], combine), rtol=2e-4, atol=2e-6)
    plain = run_threads(N, lambda c: train(c, lambda: None, 1)[:3])
    assert found[0][1].bytes["gradient"] < plain[0][1].bytes["gradient"]


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_training_goes_on_from_a_saved_state(make):
    def rank(comm):
        options = {"optimizer": AdamW(), "bucket_bytes": 600}

        def engine():
            return DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), hook=make(), **options)

        first, second = engine(), engine()
        for step in range(6):
            first.step([batches(2, seed=step)[comm.rank]])
            if step == 2:
                second.load_state_dict(first.state_dict())
            if step > 2:
                second.step([batches(2, seed=step)[comm.rank]])
        a, b = first.gather(), second.gather()
        return all((a[name] == b[name]).all() for name in a)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("make", [lambda: TopK(0.02), lambda: PowerSGD(1)])
def test_nothing_is_lost(make):
    """Sent and unsent parts add up to the sum of all gradients."""

    def rank(comm):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), hook=make())
        bucket, hook = engine.buckets[0], engine.options.hook
        channel, layout = engine.groups.shards, bucket.layout
        rng = np.random.default_rng(comm.rank)
        given, sent = np.zeros(layout.padded), np.zeros(layout.padded)
        for _ in range(5):
            data = np.zeros(layout.padded, np.float32)
            data[: layout.count] = rng.standard_normal(layout.count)
            given += data
            sent += hook.all_reduce("key", data, layout, channel, "tree").wait()
            hook.settle()
        (left,) = (v for k, v in hook.state().items() if "basis" not in k)
        return given, sent, left

    (g0, s0, l0), (g1, s1, l1) = run_threads(2, rank)
    np.testing.assert_array_equal(s0, s1)
    np.testing.assert_allclose(s0 + l0 + l1, g0 + g1, atol=1e-4)
    assert np.abs(l0).max() > 0.1


class Given:
    """A layer whose gradients are whole numbers, so that sums are exact in any order."""

    def __init__(self, seed):
        self.rng, self.total = np.random.default_rng(seed), np.zeros((12, 9))

    def parameters(self):
        return {"weight": ParameterSpec((12, 9))}

    def forward(self, params, x):
        return x, None

    def backward_input(self, params, saved, dy):
        return dy

    def backward_weight(self, params, saved, dy, out=None):
        gradient = self.rng.integers(-50, 50, (12, 9)).astype(np.float32)
        self.total += gradient
        return {"weight": gradient}


@pytest.mark.parametrize("zero", range(3))
def test_error_feedback_is_exact_in_the_engine(zero):
    """What parameters moved by, times -1, and what is still unsent: all gradients, to the bit."""

    def rank(comm):
        layer = Given(comm.rank)
        options = {"optimizer": SGD(1.0), "hook": TopK(0.1), "zero": zero, "order": "rank"}
        mesh = Mesh(comm, dp=N)
        engine = DataParallel(Sequential([("a", layer)]), Counting(), mesh, **options)
        for _ in range(6):
            engine.step([(np.zeros((1, 1), np.float32), np.zeros(1))] * 2)
        left = engine.options.hook.state()["unsent a.weight"][:108].reshape(12, 9)
        return engine.gather()["a.weight"], left, layer.total

    found = run_threads(N, rank)
    moved = {value.tobytes() for value, *_ in found}
    assert len(moved) == 1
    given = sum(total for *_, total in found)
    left = sum(left.astype(np.float64) for _, left, _ in found)
    assert np.abs(left).max() > 0
    np.testing.assert_array_equal(-found[0][0].astype(np.float64) + left, given)


class Counting:
    """A loss with one sample in all, so that gradients are not divided."""

    def forward(self, logits, targets):
        return 0.0, 0, None

    def backward(self, saved, scale):
        return np.zeros((1, 1), np.float32)


@pytest.mark.parametrize("make", [lambda: None, lambda: TopK(0.1), lambda: PowerSGD(2)])
@pytest.mark.parametrize("zero", range(3))
def test_compressed_training_learns(make, zero):
    """Random labels of 24 samples, learnt by heart."""

    def rank(comm):
        options = {"optimizer": AdamW(0.02), "hook": make(), "zero": zero}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        own = batches(4, seed=1)[2 * comm.rank :][:2]
        return [engine.step(own).loss for _ in range(120)]

    losses = run_threads(2, rank)[0]
    assert losses[0] > 1.3
    assert losses[-1] < 0.2


@pytest.mark.parametrize("make", [lambda: TopK(0.1), lambda: PowerSGD(1)])
def test_an_infinite_gradient_does_not_stay(make):
    def rank(comm):
        options = {"optimizer": AdamW(), "hook": make(), "nonfinite": "skip", "zero": 1}
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), **options)
        good, bad = batches(2)[comm.rank], batches(2)[comm.rank]
        if comm.rank == 1:
            bad[0][0, 0] = np.inf
        with np.errstate(invalid="ignore"):
            skipped = [engine.step([sample]).skipped for sample in (good, bad, good, good)]
        finite = all(np.isfinite(value).all() for value in engine.gather().values())
        return skipped, finite

    assert run_threads(2, rank) == [([False, True, False, False], True)] * 2


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: TopK(0.5), {"zero": 3}, "use it with zero=0, 1, 2, not 3"),
        (lambda: PowerSGD(), {"zero": 3}, "PowerSGD keeps what it has not sent of all gradients"),
        (lambda: Compress("bfloat16"), {"precision": "fp16"}, "precision has float16 gradients"),
        (lambda: Compress("int8"), {}, "accepted are float16 and bfloat16"),
        (lambda: TopK(0), {}, "ratio=0"),
        (lambda: PowerSGD(0), {}, "rank=0"),
    ],
)
def test_what_cannot_be_compressed_is_refused(make, options, text):
    with pytest.raises(RankFailed, match=f"ArgumentError.*{text}"):
        run_threads(1, lambda c: train(c, make, **options)[:1])

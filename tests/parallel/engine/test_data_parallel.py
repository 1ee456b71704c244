"""Every way to spread the work gives the numbers of one process, most of them to the bit."""

import hashlib

import numpy as np
import pytest

from parallel import serial
from parallel.models import SIZES, CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import SGD, AdamW, DataParallel, Mesh, Sequential
from pycoll.parallel.nn import Linear
from pycoll.parallel.random import Key
from pycoll.testing import run_processes, run_threads
from samples import sample

STEPS = 50
BUCKETS = [1 << 8, 700, 25 << 20]


def digest(params):
    return hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()


def train(comm, total, steps, model=mlp, axes=(("dp", -1),), data=batches, **options):
    """Train on ``data(total, seed=step)`` and return digests, losses and norms."""
    with Mesh(comm, **dict(axes)) as mesh:
        engine = DataParallel(model(), CrossEntropy(), mesh, **options)
        k, r = total // engine.groups.data.world_size, engine.groups.data.rank
        log = []
        for step in range(steps):
            report = engine.step(data(total, seed=step)[r * k : (r + 1) * k])
            log.append((report.loss, report.grad_norm))
        found = digest(engine.gather()), log
        engine.close()
    return found


def expect(total, steps, add, model=mlp, optimizer=None, clip=None, data=batches):
    params, log = serial.train(
        model(),
        CrossEntropy(),
        [data(total, seed=step) for step in range(steps)],
        optimizer or serial.AdamW(),
        add,
        clip,
    )
    return digest(params), log


def check(found, expected):
    """Compare on every rank: parameters and norms to the bit; losses are summed in float64."""
    for sha, log in found:
        assert [norm for _, norm in log] == [norm for _, norm in expected[1]]
        losses = [loss for loss, _ in expected[1]]
        np.testing.assert_allclose([loss for loss, _ in log], losses, rtol=1e-14)
        assert sha == expected[0]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_rank_order_equals_one_process(n):
    expected = expect(n, STEPS, serial.left, clip=0.2)
    for zero in range(4):
        for nbytes in sample(BUCKETS, BUCKETS[zero % 3 : zero % 3 + 1]):
            options = {"order": "rank", "clip_norm": 0.2, "bucket_bytes": nbytes, "zero": zero}
            check(run_threads(n, lambda c, o=options: train(c, n, STEPS, **o)), expected)


@pytest.mark.parametrize("zero", [0, 1])
def test_tree_order_is_the_same_for_every_factorisation(zero):
    expected = expect(8, STEPS, serial.tree, clip=0.2)
    for n, nbytes in [(1, 300), (2, 300), (4, 1 << 20), (8, 700)]:
        options = {"order": "tree", "clip_norm": 0.2, "bucket_bytes": nbytes, "zero": zero}
        check(run_threads(n, lambda c, o=options: train(c, 8, STEPS, **o)), expected)


@pytest.mark.parametrize("order", ["tree", "rank"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("n", "k"), [(2, 4), (3, 3), (4, 2)])
def test_stages_2_and_3_add_over_ranks_first(zero, order, n, k):
    expected = expect(n * k, 10, serial.micro_outermost(order, n), clip=0.2)
    check(
        run_threads(n, lambda c: train(c, n * k, 10, zero=zero, order=order, clip_norm=0.2)),
        expected,
    )


@pytest.mark.parametrize("zero", [0, 3])
def test_processes_train_as_threads_do(zero):
    expected = expect(4, 20, serial.tree)
    check(run_processes(4, lambda c: train(c, 4, 20, zero=zero)), expected)


@pytest.mark.parametrize("zero", range(4))
def test_replicas_of_shards_equal_plain_data_parallelism(zero):
    expected = expect(4, 10, serial.tree)
    axes = (("replica", 2), ("dp", 2))
    check(run_threads(4, lambda c: train(c, 4, 10, zero=zero, axes=axes)), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd(fused, nesterov):
    oracle = serial.SGD(0.05, 0.9, nesterov, 1e-3)
    optimizer = SGD(0.05, 0.9, nesterov, 1e-3)
    expected = expect(2, 20, serial.tree, optimizer=oracle)
    check(
        run_threads(2, lambda c: train(c, 2, 20, optimizer=optimizer, fused=fused, zero=1)),
        expected,
    )


@pytest.mark.parametrize("zero", range(4))
def test_array_formulas_give_the_bits_of_the_kernels(zero):
    expected = expect(3, 20, serial.left)
    check(run_threads(3, lambda c: train(c, 3, 20, order="rank", zero=zero, fused=False)), expected)


def tied():
    return mlp((7, 11, 11, 11, 5), tied=True)


def unused():
    return mlp(extra=True)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("model", [tied, unused])
def test_tied_and_unused_parameters(model, zero):
    expected = expect(4, 10, serial.tree, model=model)
    ranks = 2 if zero < 2 else 4
    check(run_threads(ranks, lambda c: train(c, 4, 10, model=model, zero=zero)), expected)


def uneven(total, seed):
    """Micro-batches of different numbers of samples."""
    return [batches(1, size=1 + (3 * i + seed) % 5, seed=100 * seed + i)[0] for i in range(total)]


@pytest.mark.parametrize("zero", range(4))
def test_the_mean_is_over_samples(zero):
    expected = expect(3, 10, serial.left, data=uneven)
    check(run_threads(3, lambda c: train(c, 3, 10, order="rank", zero=zero, data=uneven)), expected)


@pytest.mark.parametrize("zero", range(4))
def test_ranks_may_have_fewer_micro_batches_or_none(zero):
    def rank(comm):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=3), zero=zero, order="rank")
        for step in range(5):
            report = engine.step(batches(3, seed=step)[: comm.rank])
        return digest(engine.gather()), report.samples

    def short(parts):  # those of rank 1, then those of rank 2, which has two
        return serial.left(parts) if zero < 2 else (parts[0] + parts[1]) + parts[2]

    def data(total, seed):
        first, second, _ = batches(3, seed=seed)
        return [first, first, second]

    nested = {True: lambda p: p[0] + (p[1] + p[2]), False: short}[zero < 2]
    sha, _ = expect(3, 5, nested, data=data)
    assert run_threads(3, rank) == [(sha, 18)] * 3


def test_gradients_match_finite_differences():
    """The oracle's own gradients: every parameter, in float64."""
    model, loss = tied(), CrossEntropy()
    params = serial.first_values(model, np.float64)
    sample = batches(1, dtype="float64")[0]
    _, _, found = serial.gradients(model, loss, params, sample)
    for name, p in params.items():
        numeric = np.zeros_like(p)
        for index in np.ndindex(p.shape):
            ends = []
            for step in (1e-6, -1e-6):
                p[index] += step
                ends.append(serial.gradients(model, loss, params, sample)[0])
                p[index] -= step
            numeric[index] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(found[name], numeric, rtol=1e-6, atol=1e-7)


def test_fast_order_stays_close_and_replicas_agree():
    expected = expect(4, STEPS, serial.left)
    found = run_threads(4, lambda c: train(c, 4, STEPS, order="any"))
    assert len({sha for sha, _ in found}) == 1
    losses = np.array([loss for loss, _ in found[0][1]])
    np.testing.assert_allclose(losses, [loss for loss, _ in expected[1]], rtol=1e-5)


def test_learning_rates_can_be_scheduled():
    def rank(comm):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=2), optimizer=AdamW(lr=7.0))
        before = digest(engine.gather())
        engine.step(batches(1), lr=0.0)
        return before == digest(engine.gather())

    assert run_threads(2, rank) == [True, True]


def test_predict_gives_the_output_of_the_last_layer():
    x = batches(1)[0][0]

    def rank(comm, zero):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), zero=zero)
        return engine.predict(x)

    outputs = [run_threads(2, rank, zero)[1] for zero in (0, 3)]
    assert outputs[0].shape == (6, SIZES[-1])
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("k", [1, 3])
def test_gradients_are_views_of_the_buckets(k):
    """A layer writes into the bucket itself, and users see that memory."""

    def rank(comm):
        places = []

        class Watched(Linear):
            def backward_weight(self, params, saved, dy, out=None):
                places.append(sorted(out))
                found = super().backward_weight(params, saved, dy, out)
                assert all(found[name] is out[name] for name in out)
                return found

        layer = Watched(7, 5, Key(1))
        options = {"zero": 0, "order": "rank", "optimizer": SGD(0.0)}
        mesh = Mesh(comm, dp=2)
        engine = DataParallel(Sequential([("a", layer)]), CrossEntropy(), mesh, **options)
        engine.step(batches(2 * k, sizes=(7, 5))[k * comm.rank :][:k])
        found = engine.gradients()
        kept = engine.buckets[0].gradients.kept
        assert all(np.shares_memory(value, kept) for value in found.values())
        return {name: value.copy() for name, value in found.items()}, places

    model = Sequential([("a", Linear(7, 5, Key(1)))])
    params = serial.first_values(model)
    samples = batches(2 * k, sizes=(7, 5))
    parts = [serial.gradients(model, CrossEntropy(), params, sample)[2] for sample in samples]
    for found, places in run_threads(2, rank):
        assert places == [["bias", "weight"]] + [[]] * (k - 1)
        for name, value in found.items():
            want = sum(serial.left([p[name] for p in half]) for half in (parts[:k], parts[k:]))
            np.testing.assert_array_equal(value, want)


def test_no_rank_has_all_gradients_of_a_sharded_run():
    def rank(comm):
        with pytest.raises(ArgumentError, match="zero=1 each rank has only its shard"):
            DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=1), zero=1).gradients()

    run_threads(1, rank)

"""Replicas that take steps of their own, and average: against serial formulas; bytes are exact."""

from functools import partial

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import SGD, Average, DataParallel, DiLoCo, Gossip, Mesh, load, save
from pycoll.testing import run_threads

INNER = SGD(0.05, momentum=0.9)
OUTER = SGD(0.7, momentum=0.7, nesterov=True)  # of the recipe in docs/parallel.md


def engine(comm, every, axes=(("replica", -1),), **options):
    options = {"optimizer": INNER, "sync_every": every, "bucket_bytes": 700, **options}
    return DataParallel(mlp(), CrossEntropy(), Mesh(comm, **dict(axes)), **options)


def train(comm, every, steps, **options):
    with engine(comm, every, **options) as trainer:
        sent = 0
        for step in range(steps):
            report = trainer.step([batches(comm.world_size, seed=step)[comm.rank]])
            sent += sum(report.bytes.get(k, 0) for k in ("average", "replica gradient"))
        return trainer.gather(), sent


def alone(params, moments, data):
    """Take steps on one process, from given parameters and momentum."""

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=1), optimizer=INNER) as trainer:
            saved = trainer.state_dict()
            trainer.load_state_dict(saved | {"parameters": params, "momentum": moments})
            for batch in data:
                trainer.step([batch])
            found = trainer.state_dict()
            return found["parameters"], found["momentum"]

    return run_threads(1, rank)[0]


def start():
    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=1), optimizer=INNER) as trainer:
            found = trainer.state_dict()
            return found["parameters"], found["momentum"]

    return run_threads(1, rank)[0]


@pytest.mark.parametrize("averaging", [Average(), Average(states=True), DiLoCo()])
def test_the_formula(averaging):
    n, every, rounds = 3, 2, 3
    params, moment = start()
    moments, velocity = [moment] * n, {name: 0 * x for name, x in params.items()}
    for i in range(rounds):
        runs = [
            alone(params, moments[r], [batches(n, seed=i * every + s)[r] for s in range(every)])
            for r in range(n)
        ]
        mean = {name: sum(run[0][name] for run in runs) / n for name in params}
        moments = [run[1] for run in runs]
        if averaging == Average(states=True):
            moments = [{k: sum(run[1][k] for run in runs) / n for k in params}] * n
        if isinstance(averaging, DiLoCo):
            delta = {name: params[name] - mean[name] for name in params}
            velocity = {name: 0.9 * velocity[name] + delta[name] for name in params}
            mean = {k: params[k] - 0.7 * (delta[k] + 0.9 * velocity[k]) for k in params}
        params = mean
    found = run_threads(n, partial(train, averaging=averaging), every, every * rounds)
    for other, _ in found:
        for name in params:
            np.testing.assert_allclose(other[name], params[name], rtol=2e-5, atol=2e-6)
            np.testing.assert_array_equal(other[name], found[0][0][name])


@pytest.mark.parametrize("averaging", [Average(), DiLoCo()])
@pytest.mark.parametrize("every", [1, 2, 8])
def test_bytes_are_divided_by_the_steps_between(averaging, every):
    plain = run_threads(2, train, None, 8)
    rare = run_threads(2, partial(train, averaging=averaging), every, 8)
    assert plain[0][1] > 0
    assert [sent * every for _, sent in rare] == [sent for _, sent in plain]


@pytest.mark.parametrize("averaging", [Average(states=True), DiLoCo()])
@pytest.mark.parametrize("zero", [0, 2])
def test_the_first_steps_are_those_of_data_parallelism(averaging, zero):
    """Then it is as if another engine went on from there; bytes are exact."""
    axes = (("replica", 2), ("dp", 2)) if zero else (("replica", 4),)
    options, first, every = {"axes": axes, "zero": zero}, 3, 2

    def rank(comm):
        data = [[batches(4, seed=s)[comm.rank]] for s in range(9)]
        periodic = {**options, "averaging": averaging}
        sent = []
        with engine(comm, every, sync_after=first, **periodic) as one:
            for batch in data[:first]:
                sent.append(one.step(batch).bytes["replica gradient"])
            begun = one.gather()
            for batch in data[first:]:
                bytes_ = one.step(batch).bytes
                assert "replica gradient" not in bytes_
                sent.append(bytes_.get("average", 0))
            one.average()  # has no effect: they are not apart after the last step
            found = one.gather()
        with engine(comm, None, **options) as plain:
            for batch in data[:first]:
                plain.step(batch)
            together, params, states = plain.gather(), *copies(plain)
        with engine(comm, every, **periodic) as other:
            for bucket, x, momentum in zip(other.buckets, params, states, strict=True):
                bucket.updated[...] = x
                bucket.slots["momentum"][...] = momentum
                bucket.publish()
            for batch in data[first:]:
                other.step(batch)
            expected = other.gather()
        for name in expected:
            np.testing.assert_array_equal(begun[name], together[name])
            np.testing.assert_array_equal(found[name], expected[name])
        size = sent[0] * (2 if isinstance(averaging, Average) else 1)
        assert sent == [sent[0]] * first + [0, size] * 3

    run_threads(4, rank)


def copies(trainer):
    """Return the updated vectors, and their momentum."""
    pairs = [(bucket.updated.copy(), bucket.slots["momentum"].copy()) for bucket in trainer.buckets]
    return zip(*pairs, strict=True)


def test_one_step_of_plain_descent_is_that_of_data_parallelism():
    options = {"optimizer": SGD(0.1)}
    rare, plain = (run_threads(4, partial(train, **options), n, 5)[0][0] for n in (1, None))
    for name in plain:
        np.testing.assert_allclose(rare[name], plain[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("zero", range(4))
def test_shards_inside_replicas(zero):
    axes = (("replica", 2), ("dp", 2))
    found = run_threads(4, partial(train, axes=axes, zero=zero), 2, 4)
    expected = run_threads(4, partial(train, axes=axes), 2, 4)
    for other, _ in found:
        for name, x in expected[0][0].items():
            np.testing.assert_array_equal(other[name], x)


@pytest.mark.parametrize(
    ("averaging", "inner"), [(Average(states=True), INNER), (DiLoCo(), SGD(0.05))]
)
@pytest.mark.parametrize("by", ["state_dict", "save"])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_run_goes_on(tmp_path, averaging, inner, by, after):
    def rank(comm):
        data = [[batches(2, seed=s)[comm.rank]] for s in range(4)]
        options = {"averaging": averaging, "optimizer": inner, "sync_after": after}
        with engine(comm, 2, **options) as first:
            for step in range(4):
                if step == 2:
                    saved = first.state_dict()
                    save(tmp_path, first)
                first.step(data[step])
            first.average()
            expected = first.gather()
        with engine(comm, 2, **options) as second:
            second.step(data[0])
            second.load_state_dict(saved) if by == "state_dict" else load(tmp_path, second)
            for step in (2, 3):
                second.step(data[step])
            second.average()
            found = second.gather()
        return all((found[name] == expected[name]).all() for name in expected)

    assert run_threads(2, rank) == [True, True]


def test_what_differs_is_not_saved():
    def rank(comm):
        with engine(comm, 2) as trainer:
            trainer.step([batches(2)[comm.rank]])
            for call in (trainer.gather, trainer.state_dict, trainer.parts):
                with pytest.raises(ArgumentError, match="different parameters after 1 steps"):
                    call()
            trainer.step([batches(2)[comm.rank]])
            trainer.gather()

    run_threads(2, rank)


@pytest.mark.parametrize(
    "options",
    [
        {"axes": (("dp", -1),)},
        {"precision": "fp16"},
        {"nonfinite": "skip"},
        {"sync_every": 0},
        {"averaging": 3},
        {"sync_after": -1},
        {"sync_every": None, "sync_after": 1},
        {"sync_every": None, "averaging": DiLoCo()},
        {"sync_every": None, "averaging": Average(states=True)},
    ],
)
def test_refused(options):
    def rank(comm):
        with pytest.raises(ArgumentError):
            engine(comm, **{"every": 2, **options})

    run_threads(1, rank)


@pytest.mark.parametrize("outer", [0.7, SGD, None])
def test_an_outer_optimizer_that_is_none(outer):
    with pytest.raises(ArgumentError, match=r"outer=.*; expected an optimizer"):
        DiLoCo(outer)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_gossip_is_a_product_with_a_doubly_stochastic_matrix(n, states):
    """Values after one average from those before it; their mean stays; bytes are exact."""
    ring = np.eye(n)
    for r in range(n):
        for end in {(r - 1) % n, (r + 1) % n} - {r}:
            ring[r, end] = 1
    ring /= ring.sum(axis=1, keepdims=True)
    assert ring.sum(axis=0) == pytest.approx(1)
    assert ring.sum(axis=1) == pytest.approx(1)

    def rank(comm):
        settings = {"averaging": Gossip(states), "precision": "fp64", "optimizer": INNER}
        with engine(comm, 1, **settings) as trainer:
            rng = np.random.default_rng(comm.rank)
            for bucket in trainer.buckets:
                for x in (bucket.updated, bucket.slots["momentum"]):
                    x[...] = rng.standard_normal(x.shape)
            before = vectors(trainer)
            trainer._periods.end(trainer.buckets, 1)
            sent = trainer.ledger.wire["average", "replica"]
            after = vectors(trainer)
            with pytest.raises(ArgumentError, match="call average"):
                trainer.gather()
            trainer.average()
            trainer.gather()
            size = sum(bucket.updated.nbytes for bucket in trainer.buckets)
            assert sent == min(2, n - 1) * size * (1 + states)
            return before, after, vectors(trainer)

    def vectors(trainer):
        slots = [b.slots["momentum"] for b in trainer.buckets] if states else []
        return np.concatenate([b.updated for b in trainer.buckets] + slots)

    before, after, last = (np.array(part) for part in zip(*run_threads(n, rank), strict=True))
    np.testing.assert_allclose(after, ring @ before, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), rtol=1e-12, atol=1e-14)
    assert ((after - after.mean(axis=0)) ** 2).sum() <= ((before - before.mean(axis=0)) ** 2).sum()
    np.testing.assert_allclose(last, np.broadcast_to(before.mean(axis=0), last.shape), atol=1e-12)


def test_gossip_trains():
    def rank(comm):
        with engine(comm, 2, averaging=Gossip(), optimizer=SGD(0.2)) as trainer:
            batch = batches(comm.world_size, seed=1)[comm.rank]
            losses = [trainer.step([batch]).loss for _ in range(30)]
            trainer.average()
            return losses, trainer.gather()

    found = run_threads(4, rank)
    for losses, parameters in found:
        assert losses[-1] < losses[0]
        for name, x in parameters.items():
            np.testing.assert_array_equal(x, found[0][1][name])


def test_average_brings_replicas_together_in_the_middle():
    def rank(comm):
        with engine(comm, 4) as trainer:
            trainer.step([batches(2)[comm.rank]])
            trainer.average()
            return trainer.gather()

    def at_once(comm):
        with engine(comm, 1) as trainer:
            trainer.step([batches(2)[comm.rank]])
            return trainer.gather()

    found, expected = run_threads(2, rank), run_threads(2, at_once)
    for name, x in expected[0].items():
        np.testing.assert_array_equal(found[0][name], x)
        np.testing.assert_array_equal(found[1][name], x)


def test_average_is_for_replicas():
    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1)) as trainer:
            with pytest.raises(ArgumentError, match="for sync_every"):
                trainer.average()

    run_threads(1, rank)


def test_digits_are_learned_all_the_same():
    """Averages of every eighth step, beside every step; benchmarks/periodic.py says more."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data / 16).astype(np.float32)[order], digits.target[order]

    def score(comm, settings):
        mesh, optimizer = Mesh(comm, replica=-1), SGD(0.2)
        with DataParallel(
            mlp((64, 32, 10)), CrossEntropy(), mesh, optimizer=optimizer, **settings
        ) as trainer:
            for step in range(160):
                chosen = np.random.default_rng([step, comm.rank]).integers(0, 1437, 32)
                trainer.step([(x[chosen], y[chosen])])
            return float((trainer.predict(x[1437:]).argmax(axis=1) == y[1437:]).mean())

    plain = run_threads(2, score, {})[0]
    assert plain > 0.9
    for averaging, first in ((Average(), 0), (DiLoCo(), 0), (DiLoCo(OUTER), 40)):
        settings = {"sync_every": 8, "sync_after": first, "averaging": averaging}
        found = run_threads(2, score, settings)
        assert min(found) > plain - 0.02

"""Attention of a sequence that is divided over ranks is attention of the whole sequence."""

import numpy as np
import pytest

from layer_checks import distance, run_layer
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import DataParallel, Mesh, Pipeline
from pycoll.parallel.context.ring import RingAttention
from pycoll.parallel.context.split import KINDS, Context
from pycoll.parallel.context.ulysses import UlyssesAttention
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import CausalAttention, TransformerConfig
from pycoll.parallel.random import Cursor, Key
from pycoll.testing import run_threads

KEY, HEADS, WIDTH, LENGTH = Key(5).fold("heads"), 4, 8, 24
LAYERS = {"zigzag": RingAttention, "ring": RingAttention, "ulysses": UlyssesAttention}


class Some:
    """A communicator that is only asked who it is."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


def numbers(dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, LENGTH, HEADS * 3 * WIDTH)).astype(dtype)
    return x, rng.standard_normal((2, LENGTH, HEADS * WIDTH)).astype(dtype)


def divided(comm, kind, dtype, drop):
    context = Context(comm, kind)
    layer = LAYERS[kind](HEADS, WIDTH, KEY, None, drop, Cursor(3, 1), context)
    x, dy = (context.take(a) for a in numbers(dtype))
    return [context.join(part) for part in run_layer(layer, {}, x, dy)[:2]]


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_is_full_attention(n, kind, dtype, bound, drop):
    whole = CausalAttention(HEADS, WIDTH, KEY, None, drop, Cursor(3, 1))
    expected = run_layer(whole, {}, *numbers(dtype))[:2]
    for found in run_threads(n, divided, kind, dtype, drop):
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype
            assert distance(got, want) < bound


def test_three_ranks_and_half_precision():
    whole = CausalAttention(HEADS, WIDTH, KEY)
    for kind in ("zigzag", "ring"):
        for dtype, bound in (("float64", 1e-14), ("float16", 2e-3)):
            expected = run_layer(whole, {}, *numbers(dtype))[:2]
            for got, want in zip(
                run_threads(3, divided, kind, dtype, 0.0)[2], expected, strict=True
            ):
                assert distance(got, want) < bound


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zigzag_divides_the_work(n):
    def imbalance(kind):
        work = [Context(Some(rank, n), kind).work(rank) for rank in range(n)]
        return max(work) / np.mean(work)

    assert imbalance("zigzag") <= 1.05
    assert imbalance("ring") >= 1.5
    pieces = 2 * n  # both compute the same blocks: half of all
    total = sum(Context(Some(r, n), "zigzag").work(r) for r in range(n))
    assert total == pieces * pieces / 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_position_is_on_one_rank(n):
    x = np.arange(2 * 12).reshape(2, 12)
    for kind in KINDS:
        parts = [Context(Some(rank, n), kind).take(x) for rank in range(n)]
        assert sorted(np.concatenate(parts, axis=1)[0]) == list(range(12))
        for rank, part in enumerate(parts):
            context = Context(Some(rank, n), kind)
            for first, stop in ((0, part.shape[1]), (1, 3)):
                runs = context.runs(first, stop, part.shape[1])
                found = np.concatenate([x[0, run] for run in runs])
                np.testing.assert_array_equal(found, part[0, first:stop])


def train(comm, kind=None, engine=DataParallel, steps=3, more=(), **axes):
    """Return losses and parameters of a GPT whose sequence may be divided."""
    with Mesh(comm, **axes) as mesh:
        tp, cursor = mesh.group("tp"), Cursor()
        context = Context(mesh.group("cp"), kind) if kind else None
        config = TransformerConfig(
            vocabulary=32,
            features=16,
            heads=4,
            depth=2,
            length=16,
            dropout=0.1,
            cursor=cursor,
            comm=tp if tp.world_size > 1 else None,
            sequence_parallel=tp.world_size > 1,
            context=context,
        )
        network, losses = GPT(config, seed=1), []
        with engine(network, network.loss(), mesh, *more, zero=1) as trainer:
            for step in range(steps):
                cursor.at(step, 2 * mesh.coordinate("dp"))
                rows = np.random.default_rng(step).integers(0, 32, (4, 17))
                rows = rows[2 * mesh.coordinate("dp") :][:2] if mesh.size("dp") > 1 else rows[:2]
                sample = rows[:, :-1], rows[:, 1:]
                if context is not None:
                    sample = tuple(map(context.take, sample))
                losses.append(trainer.step([sample], lr=1e-2).loss)
            return losses, trainer.gather()


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("zigzag", {"cp": 2}),
        ("ring", {"dp": 2, "cp": 2}),
        ("ulysses", {"cp": 4}),
        ("zigzag", {"cp": 2, "tp": 2}),
        ("ulysses", {"cp": 2, "tp": 2}),
        ("zigzag", {"pp": 2, "cp": 2}),
    ],
)
def test_a_gpt_trains_as_on_one_rank(kind, axes):
    n, dp = int(np.prod(list(axes.values()))), axes.get("dp", 1)
    losses, params = run_threads(dp, lambda comm: train(comm, dp=-1))[0]
    kinds = {"engine": Pipeline, "more": ("1f1b", 1)} if "pp" in axes else {}
    for found, values in run_threads(n, lambda comm: train(comm, kind, **kinds, **axes)):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, value in params.items():
            assert distance(values[name], value) < 1e-3, name  # Adam divides by small numbers


def test_what_is_refused():
    with pytest.raises(ArgumentError, match=r"10 positions .* 4 equal pieces .* divisible by 4"):
        Context(Some(0, 2)).take(np.zeros((1, 10)))
    with pytest.raises(ArgumentError, match="kind='zag'; accepted: zigzag, ring, ulysses"):
        Context(Some(0, 2), "zag")
    with pytest.raises(ArgumentError, match="heads: 4 heads cannot be split over 1 tensor-p"):
        UlyssesAttention(4, 8, KEY, context=Context(Some(0, 3), "ulysses"))
    with pytest.raises(ArgumentError, match="expected zigzag, ring"):
        RingAttention(4, 8, KEY, context=Context(Some(0, 2), "ulysses"))

    def rank(comm):
        with pytest.raises(ArgumentError, match=r"dp = ranks / \(tp=3\) = 4 / 3 is not whole"):
            Mesh(comm, dp=-1, tp=3)
        with Mesh(comm, dp=2, cp=2) as mesh:
            context = Context(mesh.cp)
            network = GPT(TransformerConfig(16, 4, vocabulary=32, context=context), seed=1)
            with DataParallel(network, network.loss(), mesh) as engine:
                tokens = context.take(np.zeros((1, 8), int))
                count = 1 + mesh.coordinate("cp")
                with pytest.raises(MismatchError, match="ranks of one cp group, which share"):
                    engine.step([(tokens, tokens)] * count)

    run_threads(4, rank)


class Failing(RingAttention):
    fails = True

    def _scores(self, q, keys, block):
        if self.fails:
            raise ValueError("no scores today")
        return super()._scores(q, keys, block)


def test_an_error_leaves_no_receive_behind():
    def rank(comm):
        odd = np.ones((2, 3, HEADS * 3 * WIDTH), "f4")
        layer = RingAttention(HEADS, WIDTH, KEY, context=Context(comm, "zigzag"))
        with pytest.raises(ArgumentError, match="3 positions on each of 2 context-parallel"):
            layer.forward({}, odd)
        with pytest.raises(ValueError, match="no scores"):
            Failing(HEADS, WIDTH, KEY, context=Context(comm, "ring")).forward({}, odd)
        assert not [work for work in comm._session.under_way if not work._sends]

    run_threads(2, rank)

"""Layers that run forward again in the backward pass: the same bits, and less memory."""

import tracemalloc

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Pipeline
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import TransformerConfig
from pycoll.parallel.random import Cursor
from pycoll.testing import run_threads

M = 4


class Batch:
    """Micro-batches that set the cursor when they are taken, as a loader does."""

    def __init__(self, cursor, step, length):
        self.cursor, self.step, self.length = cursor, step, length

    def __len__(self):
        return M

    def __getitem__(self, i):
        self.cursor.at(self.step, 2 * i)
        tokens = np.random.default_rng([self.step, i]).integers(0, 32, (2, self.length + 1))
        return tokens[:, :-1], tokens[:, 1:]


def train(comm, kind, recompute, length=16, depth=3, steps=3, **axes):
    with Mesh(comm, **axes) as mesh:
        cursor, tp = Cursor(), mesh.group("tp")
        config = TransformerConfig(
            vocabulary=32,
            features=16,
            heads=2,
            depth=depth,
            length=length,
            dropout=0.1,
            cursor=cursor,
            comm=tp if tp.world_size > 1 else None,
        )
        model = GPT(config, seed=1)
        more = {"schedule": "zb_h1", "micro_batches": M} if kind is Pipeline else {}
        more["recompute"] = recompute
        with kind(model, model.loss(), mesh, **more) as engine:
            for step in range(steps):
                engine.step(Batch(cursor, step, length))
            return engine.gather()


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (DataParallel, {"dp": 1}),
        (DataParallel, {"tp": 2}),
        (Pipeline, {"pp": 2}),
        (Pipeline, {"pp": 2, "tp": 2}),
    ],
)
def test_the_bits_are_the_same(kind, axes):
    n = int(np.prod(list(axes.values())))
    expected = run_threads(n, lambda c: train(c, kind, "none", **axes))
    for how in ("full", "selective", 2, 4):
        found = run_threads(n, lambda c, how=how: train(c, kind, how, **axes))
        for name, value in expected[0].items():
            assert found[0][name].tobytes() == value.tobytes(), (how, name)


@pytest.mark.parametrize("how", ["full", "selective", 2, 3])
def test_sharded_parameters_and_ranks_without_samples(how):
    """Layers that run again are gathered again, also by ranks that have nothing to run."""

    def rank(comm, how):
        with Mesh(comm, dp=2) as mesh:
            config = TransformerConfig(vocabulary=32, features=16, heads=2, depth=3, length=8)
            model, cursor = GPT(config, seed=1), Cursor()
            with DataParallel(model, model.loss(), mesh, zero=3, recompute=how) as engine:
                for step in range(2):
                    samples = [Batch(cursor, step, 8)[i] for i in range(3 - 2 * comm.rank)]
                    engine.step(samples)
                return engine.gather()

    expected = run_threads(2, rank, "none")[0]
    for found in run_threads(2, rank, how):
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name


def test_a_pipeline_with_dropout_is_one_process():
    expected = run_threads(1, lambda c: train(c, DataParallel, "none", dp=1))[0]
    found = run_threads(2, lambda c: train(c, Pipeline, "full", pp=2))[1]
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name


def test_less_memory_is_needed():
    def peak(recompute):
        def rank(comm):
            train(comm, DataParallel, recompute, 64, 8, steps=1, dp=1)
            tracemalloc.start()
            try:
                train(comm, DataParallel, recompute, 64, 8, steps=1, dp=1)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        return run_threads(1, rank)[0]

    whole, full, selective, every = map(peak, ("none", "full", "selective", 3))
    assert full < 0.5 * whole
    assert full < every < whole  # keeps fewer inputs, but makes three layers at a time
    assert full < selective < 0.9 * whole


def test_what_is_accepted():
    def rank(comm):
        with pytest.raises(ArgumentError, match=r"recompute='all'; expected none, full, selective"):
            train(comm, DataParallel, "all", dp=1)

    run_threads(1, rank)

"""The order of samples depends on the seed and on their numbers only."""

import hashlib
import json

import numpy as np
import pytest

from parallel.models import SIZES, CrossEntropy, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Sampler
from pycoll.testing import run_threads


def steps_of(ranks, steps=5, **options):
    """Return the samples of each step, as all ranks together take them."""
    samplers = [Sampler(23, batch=8, **options) for _ in range(ranks)]
    return [
        [part for rank, s in enumerate(samplers) for part in s.next(rank, ranks)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 11])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_ranks_share_the_micro_batches_of_one_process(ranks, micro_batch):
    options = {"micro_batch": micro_batch, "seed": 7}
    assert str(steps_of(ranks, **options)) == str(steps_of(1, **options))


@pytest.mark.parametrize("ranks", [1, 3, 8, 11])
def test_without_micro_batches_every_rank_has_one(ranks):
    (whole,), parts = steps_of(1, 1)[0], steps_of(ranks, 1)[0]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert len(parts) == min(ranks, 8)


def test_an_epoch_has_every_sample_once_and_another_order():
    numbers = Sampler(23, batch=8).samples(0, 3 * 23)
    epochs = numbers.reshape(3, 23)
    assert (np.sort(epochs) == np.arange(23)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert Sampler(23, batch=8, shuffle=False).samples(20, 26).tolist() == [20, 21, 22, 0, 1, 2]
    other = Sampler(23, batch=8, seed=1).samples(0, 23)
    assert other.tolist() != numbers[:23].tolist()


def test_the_order_is_the_same_on_every_machine():
    """The bits were written down: a new version of NumPy must not change them."""
    numbers = Sampler(1000, batch=8, seed=5).samples(0, 2000)
    digest = hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "43259e1b226cb47b"


def test_a_run_goes_on_with_other_ranks_and_batches():
    first = Sampler(23, batch=8, seed=2)
    for _ in range(4):
        first.next()
    saved = json.loads(json.dumps(first.state_dict()))
    second = Sampler(23, batch=6, seed=2)
    second.load_state_dict(saved)
    assert (second.position, second.epoch) == (32, 1)
    assert np.concatenate(second.next(1, 2)).tolist() == first.samples(35, 38).tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [({"seed": "3"}, "seed '3'"), ({"size": 24}, "size 24"), ({"position": -1}, "position=-1")],
)
def test_another_order_is_refused(change, told):
    sampler = Sampler(23, batch=8)
    with pytest.raises(ArgumentError, match=told):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.position == 0


@pytest.mark.parametrize("saved", [None, 3])
def test_no_order(saved):
    """As what `load` returns has, if the program saved nothing of its own."""
    with pytest.raises(ArgumentError, match="; expected that of state_dict"):
        Sampler(23, batch=8).load_state_dict(saved)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0, "batch": 8},
        {"size": 8, "batch": 0},
        {"size": 8, "batch": 8, "micro_batch": 3},
        {"size": 8, "batch": 8.5},
    ],
)
def test_refused(options):
    with pytest.raises(ArgumentError):
        Sampler(**options)


def test_ranks_that_there_are_not():
    with pytest.raises(ArgumentError, match="rank=2"):
        Sampler(8, batch=8).next(2, 2)


def test_training_gives_the_same_bits_on_any_number_of_ranks():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], 40)

    def rank(comm):
        sampler = Sampler(40, batch=32, micro_batch=4, seed=1)
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), zero=1) as engine:
            for _ in range(6):
                engine.step([(x[i], y[i]) for i in sampler.next(comm.rank, comm.world_size)])
            params = engine.gather()
        return hashlib.sha256(b"".join(params[name].tobytes() for name in params)).hexdigest()

    assert len({digest for n in (1, 2, 4, 8) for digest in run_threads(n, rank)}) == 1

"""Parameters that layers on several stages share: the bits of one process, for every cut."""

import math

import numpy as np
import pytest

from parallel import models, serial
from pycoll.errors import ArgumentError
from pycoll.parallel import AdamW, DataParallel, Mesh, Pipeline
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import TransformerConfig
from pycoll.testing import run_threads

SIZES, M, STEPS, CLIP = (6, 6, 6, 6, 6), 4, 3, 0.2
OWNER, COPIES = "linear0.weight", ["linear1.weight", "linear2.weight", "linear3.weight"]


def batch(step, place):
    return models.batches(M, seed=10 * step + place, sizes=SIZES)


def simulate(ranks, add):
    """Train in one process: each use is added over all micro-batches, then the uses are."""
    model = models.mlp(SIZES)
    params, optimizer = serial.first_values(model), serial.AdamW()
    for name in COPIES:
        params[name] = params[OWNER]
    norms = []
    for step in range(STEPS):
        samples = [sample for rank in range(ranks) for sample in batch(step, rank)]
        parts = [serial.gradients(model, models.CrossEntropy(), params, s) for s in samples]
        count = sum(part[1] for part in parts)
        total = {name: add([part[2][name] for part in parts]) for name in params}
        for name in COPIES:
            total[OWNER] = total[OWNER] + total.pop(name)
        own = {name: params[name] for name in total}
        wide = np.concatenate([g.ravel() for g in total.values()]).astype(np.float64)
        norms.append(math.sqrt(math.fsum(wide * wide)) / count)
        scale = 1 / count * (CLIP / norms[-1] if norms[-1] > CLIP else 1)
        optimizer.step(own, total, scale, serial.no_decay(model))
        params = own | dict.fromkeys(COPIES, own[OWNER])
    return own, norms


def rank(comm, dp, p, schedule, zero, state=None):
    settings = {"zero": zero, "optimizer": AdamW(), "clip_norm": CLIP}
    model = models.mlp(SIZES, tied=True)
    with (
        Mesh(comm, dp=dp, pp=p) as mesh,
        Pipeline(model, models.CrossEntropy(), mesh, schedule, M, **settings) as engine,
    ):
        if state is not None:
            engine.load_state_dict(state)
        place = mesh.coordinate("dp")
        norms = [engine.step(batch(step, place)).grad_norm for step in range(STEPS)]
        return engine.gather(), norms, engine.state_dict()


@pytest.mark.parametrize(
    ("dp", "p", "schedule", "zero"),
    [
        (1, 1, "gpipe", 0),
        (1, 2, "1f1b", 0),
        (1, 3, "zb_h1", 3),
        (1, 2, "zb_v", 1),
        (2, 2, "interleaved:2", 1),
        (2, 2, "1f1b", 2),
        (2, 2, "gpipe", 3),
    ],
)
def test_the_bits_are_those_of_one_process(dp, p, schedule, zero):
    add = serial.micro_outermost("tree", dp) if zero >= 2 else serial.tree
    expected, norms = simulate(dp, add)
    for found, seen, _ in run_threads(dp * p, rank, dp, p, schedule, zero):
        assert found.keys() == expected.keys()
        assert seen == pytest.approx(norms, rel=1e-12)  # a copy would count twice
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name


def test_a_state_has_each_parameter_once_and_fits_every_cut():
    saved = run_threads(2, rank, 1, 2, "1f1b", 1)[0][2]
    assert not set(COPIES) & saved["parameters"].keys()
    expected = run_threads(1, rank, 1, 1, "gpipe", 0, saved)[0][0]
    for found, *_ in run_threads(3, rank, 1, 3, "zb_h1", 3, saved):
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name

    def plain(comm):
        model = models.mlp(SIZES, tied=True)
        with Mesh(comm) as mesh, DataParallel(model, models.CrossEntropy(), mesh) as engine:
            engine.load_state_dict(saved)
            return engine.gather()

    for name, value in run_threads(1, plain)[0].items():
        assert value.tobytes() == saved["parameters"][name].tobytes()


def test_one_micro_batch_of_a_tied_gpt_is_that_of_data_parallelism():
    """With one micro-batch and one rank there is one way to add."""

    def train(comm, kind, *more, **axes):
        config = TransformerConfig(vocabulary=32, features=16, heads=2, depth=2, length=8)
        model = GPT(config, seed=1, tied=True)
        with Mesh(comm, **axes) as mesh, kind(model, model.loss(), mesh, *more) as engine:
            for step in range(3):
                tokens = np.random.default_rng(step).integers(0, 32, (4, 9))
                report = engine.step([(tokens[:, :-1], tokens[:, 1:])])
            return engine.gather(), report.bytes.get("tied", 0)

    expected, _ = run_threads(1, lambda comm: train(comm, DataParallel, dp=1))[0]
    for found, sent in run_threads(2, lambda comm: train(comm, Pipeline, "1f1b", 1, pp=2)):
        assert sent == 32 * 16 * 4  # the gradient there, its sum back
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name


def test_ties_need_a_flush():
    def one(comm):
        model = models.mlp(SIZES, tied=True)
        with Mesh(comm, pp=2) as mesh, pytest.raises(ArgumentError, match="would not stay the"):
            Pipeline(model, models.CrossEntropy(), mesh, "2bw", M)

    run_threads(2, one)

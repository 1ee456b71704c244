"""The estimator against the ledger of real runs, and against published tables."""

import numpy as np
import pytest

from parallel.engine.test_data_parallel import tied
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import SGD, AdamW, DataParallel, Mesh, Sequential, estimate
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.nn import Linear
from pycoll.parallel.random import Key
from pycoll.testing import run_threads

CONFIGURATIONS = [
    ({"dp": 2}, 1, {}),
    ({"dp": 2}, 4, {"bucket_bytes": 300}),
    ({"dp": 3}, 5, {"order": "rank", "bucket_bytes": 600}),
    ({"dp": 4}, 8, {"prefetch": 0, "optimizer": SGD(momentum=0.9)}),
    ({"replica": 2, "dp": 2}, 3, {"precision": "bf16"}),
    ({"dp": 2}, 2, {"precision": "fp64", "prefetch": 2}),
    ({"dp": 1}, 3, {"optimizer": SGD()}),
]


def chain():
    """Return a model of the library's layers, which write gradients where they are told."""
    sizes = zip((7, 19, 11), (19, 11, 5), strict=True)
    layers = [(f"linear{i}", Linear(*s, Key(i).fold("x"))) for i, s in enumerate(sizes)]
    return Sequential(layers)


@pytest.mark.parametrize("model", [mlp, tied, chain])
@pytest.mark.parametrize(("axes", "k", "options"), CONFIGURATIONS)
@pytest.mark.parametrize("zero", range(4))
def test_estimates_equal_the_ledger(zero, axes, k, options, model):
    def rank(comm):
        mesh = Mesh(comm, **axes)
        engine = DataParallel(model(), CrossEntropy(), mesh, zero=zero, **options)
        reports = [engine.step(batches(k)) for _ in range(2)]
        live = {kind: engine.ledger.live[kind] for kind in ("parameter", "gradient", "optimizer")}
        assert engine.ledger.total == sum(live.values())
        told = estimate(model(), mesh=mesh, micro_batches=k, zero=zero, **options)
        return live, max(r.peak_bytes for r in reports), reports[1].bytes, told

    world = 1
    for size in axes.values():
        world *= size
    for live, peak, sent, told in run_threads(world, rank):
        assert live == {k: getattr(told, k) for k in ("parameter", "gradient", "optimizer")}
        assert sent == told.wire
        assert peak == told.peak


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("zero", range(4))
def test_a_split_sequence_adds_gradients_over_its_ranks(zero, k):
    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        model = GPT(TransformerConfig(8, 2, comm=mesh.tp, sequence_parallel=True), seed=0)
        tokens = np.ones((2, 4), int)
        report = DataParallel(model, model.loss(), mesh, zero=zero).step([(tokens, tokens)] * k)
        return report.bytes, estimate(model, mesh=mesh, micro_batches=k, zero=zero).wire

    for sent, told in run_threads(4, rank):
        assert sent["sequence"] > 0
        assert sent == told


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")]
)
def test_the_table_of_the_zero_paper(zero, gigabytes):
    """7.5 billion parameters on 64 ranks; Rajbhandari et al., SC 2020, figure 1."""
    told = estimate(7.5e9, "fp16", {"dp": 64}, zero=zero)
    assert f"{told.at_rest / 1e9:.1f}" == gigabytes


def test_twenty_bytes_per_parameter():
    """10 billion parameters with gradients in both types: 200 GB."""
    assert round(estimate(10e9, "fp16_copy").at_rest / 1e9) == 200
    assert round(estimate(10e9, "bf16").at_rest / 1e9) == 180
    assert round(estimate(10e9, "fp32", optimizer=SGD()).at_rest / 1e9) == 80


def test_tensor_parallel_ranks_divide_a_number_of_parameters():
    whole, split = estimate(2**20), estimate(2**20, mesh={"dp": 2, "tp": 4})
    assert split.parameter * 4 == whole.parameter
    assert split.wire["gradient"] == split.gradient


def test_a_printed_estimate_names_its_parts():
    text = str(estimate(1000, mesh={"dp": 2}, zero=1, optimizer=AdamW()))
    assert "optimizer states" in text
    assert "sent per step: gradient" in text
    assert "4,096 B" in text


def test_bad_meshes_are_refused():
    with pytest.raises(ArgumentError, match="accepted are sizes >= 1"):
        estimate(1000, mesh={"dp": 0})


@pytest.mark.parametrize("model", [-5, float("nan"), float("inf")])
def test_numbers_of_parameters_that_there_cannot_be(model):
    with pytest.raises(ArgumentError, match=r"model=.*; accepted are numbers in \[0, inf\)"):
        estimate(model)


def test_an_axis_that_the_engine_refuses_is_refused():
    with pytest.raises(
        ArgumentError, match="axis pp=4; data parallelism knows replica, dp, cp, tp"
    ):
        estimate(1000, mesh={"dp": 2, "pp": 4})

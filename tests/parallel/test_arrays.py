"""Layers on arrays of other libraries give what they give on NumPy's."""

import subprocess
import sys

import numpy as np
import pytest

from layer_checks import distance, part, parts, perturbed, run_layer
from pycoll.parallel import SGD, DataParallel, Mesh
from pycoll.parallel.arrays import add_rows, sum_rows
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import Embedding, LayerNorm, Linear
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.layers import GELU, ReLU, Tanh
from pycoll.parallel.nn.losses import CrossEntropy
from pycoll.parallel.nn.positional import Dropout
from pycoll.parallel.nn.transformer import Block, TransformerConfig
from pycoll.parallel.random import Cursor, Key
from pycoll.parallel.tensor.layers import VocabParallelCrossEntropy, VocabParallelEmbedding
from pycoll.testing import run_threads

KEY, CURSOR = Key(2).fold("layer"), Cursor(1, 2)
H = 8
LAYERS = {
    "linear": (Linear(H, 5, KEY), (2, 4, H)),
    "norm": (LayerNorm(H, KEY), (2, 4, H)),
    "gelu": (GELU(), (2, 4, H)),
    "relu": (ReLU(), (2, 4, H)),
    "tanh": (Tanh(), (2, 4, H)),
    "dropout": (Dropout(0.3, KEY, CURSOR), (2, 4, H)),
    "attention": (CausalAttention(2, 4, KEY, None, 0.2, CURSOR), (2, 4, 3 * H)),
    "block": (Block(TransformerConfig(H, 2, dropout=0.2, cursor=CURSOR), KEY), (2, 4, H)),
}


@pytest.fixture
def torch():
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def compare(found, wanted, tolerance=1e-6):
    for got, want in zip(found[:2], wanted[:2], strict=True):
        if want is not None:
            assert distance(got, want) < tolerance
    assert list(found[2]) == list(wanted[2])
    for name, want in wanted[2].items():
        assert distance(found[2][name], want) < tolerance, name


@pytest.mark.parametrize("name", LAYERS)
def test_torch_tensors(torch, name):
    layer, shape = LAYERS[name]
    rng = np.random.default_rng(0)
    params, x = perturbed(layer, rng, np.float32), rng.standard_normal(shape).astype(np.float32)
    dy = rng.standard_normal(layer.forward(params, x)[0].shape).astype(np.float32)
    tensors = {key: torch.tensor(value) for key, value in params.items()}
    found = run_layer(layer, tensors, torch.tensor(x), torch.tensor(dy))
    for tensor in (found[0], found[1], *found[2].values()):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == torch.float32
    compare(found, run_layer(layer, params, x, dy))


@pytest.mark.parametrize("name", ["linear", "norm", "attention", "block"])
def test_torch_bfloat16(torch, name):
    layer, shape = LAYERS[name]
    rng = np.random.default_rng(0)
    params, x = perturbed(layer, rng), rng.standard_normal(shape)
    dy = rng.standard_normal(layer.forward(params, x)[0].shape)
    tensors = {key: torch.tensor(value).to(torch.bfloat16) for key, value in params.items()}
    arrays = (torch.tensor(a).to(torch.bfloat16) for a in (x, dy))
    y, dx, gradients = run_layer(layer, tensors, *arrays)
    assert {t.dtype for t in (y, dx, *gradients.values())} == {torch.bfloat16}
    wide = {key: value.float() for key, value in gradients.items()}
    compare((y.float(), dx.float(), wide), run_layer(layer, params, x, dy), 0.05)


def test_torch_embedding_and_loss(torch):
    rng = np.random.default_rng(0)
    layer, tokens = Embedding(7, 4, KEY), rng.integers(0, 7, (3, 5))
    params, dy = perturbed(layer, rng, np.float32), rng.random((3, 5, 4), np.float32)
    tensors = {key: torch.tensor(value) for key, value in params.items()}
    compare(
        run_layer(layer, tensors, tokens, torch.tensor(dy)), run_layer(layer, params, tokens, dy)
    )
    logits, targets = (
        rng.random((3, 5, 7), np.float32),
        np.where(rng.random((3, 5)) < 0.5, tokens, -100),
    )
    results = []
    for values in (logits, torch.tensor(logits)):
        total, count, saved = CrossEntropy().forward(values, targets)
        results.append((total, count, CrossEntropy().backward(saved, 0.5)))
    (want, want_count, want_gradient), (got, got_count, gradient) = results
    assert (got, got_count) == (pytest.approx(want, rel=1e-6), want_count)
    assert distance(gradient, want_gradient) < 1e-6


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_torch_tensors_on_two_ranks(torch, sequence_parallel):
    rng = np.random.default_rng(0)
    whole = Block(TransformerConfig(H, 2), KEY)
    table = Embedding(6, H, KEY)
    params, rows = perturbed(whole, rng, np.float32), perturbed(table, rng, np.float32)
    tokens = rng.integers(0, 6, (2, 4))
    x = table.forward(rows, tokens)[0]
    wanted = run_layer(whole, params, x, x)
    logits = wanted[0][..., :6]
    want, _, saved = CrossEntropy().forward(logits, tokens)
    want_gradient = CrossEntropy().backward(saved, 1.0)

    def rank(comm):
        split = {"comm": comm, "sequence_parallel": sequence_parallel}
        layer = Block(TransformerConfig(H, 2, **split), KEY)
        ends = VocabParallelEmbedding(6, H, KEY, comm, sequence_parallel)
        specs = layer.parameters()
        tensors = {k: torch.tensor(v) for k, v in parts(params, specs, comm).items()}
        own = {k: torch.tensor(v) for k, v in parts(rows, ends.parameters(), comm).items()}
        inner = ends.forward(own, tokens)[0]
        y, dx, gradients = run_layer(layer, tensors, inner, inner)
        axis = 1 if sequence_parallel else None
        for name, spec in specs.items():
            got = comm.all_reduce(gradients[name]) if spec.sequence else gradients[name]
            assert distance(got, part(wanted[2][name], spec.tensor_axis, comm)) < 1e-6
        assert distance(y, part(wanted[0], axis, comm)) < 1e-6
        assert distance(dx, part(wanted[1], axis, comm)) < 1e-6
        loss = VocabParallelCrossEntropy(comm)
        total, _, saved = loss.forward(torch.tensor(part(logits, 2, comm)), tokens)
        assert total == pytest.approx(want, rel=1e-6)
        assert distance(loss.backward(saved, 1.0), part(want_gradient, 2, comm)) < 1e-6

    run_threads(2, rank)


@pytest.fixture
def strict():
    """A library with nothing but the array API standard: what works with it needs no NumPy."""
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    return pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")


@pytest.mark.parametrize("name", LAYERS)
def test_standard_arrays(strict, name):
    layer, shape = LAYERS[name]
    rng = np.random.default_rng(0)
    params, x = perturbed(layer, rng, np.float32), rng.standard_normal(shape).astype(np.float32)
    dy = rng.standard_normal(layer.forward(params, x)[0].shape).astype(np.float32)
    arrays = {key: strict.asarray(value) for key, value in params.items()}
    found = run_layer(layer, arrays, strict.asarray(x), strict.asarray(dy))
    for array in (found[0], found[1], *found[2].values()):
        assert type(array) is type(strict.asarray(0))
        assert array.dtype == strict.float32
    compare(found, run_layer(layer, params, x, dy))


def test_standard_arrays_through_a_whole_model(strict):
    """A GPT on the engine, which hands out its buckets as such arrays and gets gradients back."""

    def train(comm, zero, tied, wrap):
        model = GPT(TransformerConfig(H, 2, 2, vocabulary=7, length=5), 1, tied=tied)
        mesh = Mesh(comm, dp=2)
        engine = DataParallel(model, model.loss(), mesh, zero=zero, wrap=wrap, optimizer=SGD(0.3))
        rng = np.random.default_rng(comm.rank)
        tokens = rng.integers(0, 7, (2, 3, 6))
        targets = np.where(tokens[..., 1:] == 6, -100, tokens[..., 1:])
        samples = list(zip(tokens[..., :-1], targets, strict=True))
        return [engine.step(samples).loss for _ in range(4)]

    def share(array):
        return strict.asarray(array, copy=False)

    for zero, tied in ((0, True), (2, False), (3, True)):
        want = run_threads(2, train, zero, tied, lambda array: array)
        got = run_threads(2, train, zero, tied, share)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert want[0][-1] < want[0][0]


def test_rows_are_added():
    rng = np.random.default_rng(1)
    for count, n in ((5, 40), (40, 5), (3, 0), (1, 1)):
        indices, rows = rng.integers(0, count, n), rng.standard_normal((n, 4))
        want = np.zeros((count, 4))
        np.add.at(want, indices, rows)
        np.testing.assert_allclose(add_rows(count, indices, rows), want, rtol=1e-13)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_columns_are_summed(n):
    a, b = np.random.default_rng(1).standard_normal((2, n, 5))
    np.testing.assert_allclose(sum_rows(a), a.sum(axis=0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(sum_rows(a, b), (a * b).sum(axis=0), rtol=0, atol=1e-13)


def test_sums_of_many_rows_are_accurate():
    x = np.random.default_rng(1).random((1 << 16, 3), np.float32)
    exact = x.sum(axis=0, dtype=np.float64)
    assert np.abs(sum_rows(x) / exact - 1).max() < 1e-6
    assert np.abs(sum_rows(x, x) / (x.astype(np.float64) ** 2).sum(axis=0) - 1).max() < 1e-6


def test_layers_need_only_numpy():
    """Neither importing nor running the layers imports another array library."""
    code = """
import sys
import numpy as np
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.parallel.nn import initial
model = GPT(TransformerConfig(8, 2, vocabulary=5, length=4), seed=0)
x = np.zeros((1, 4), int)
for name, layer in model.layers:
    x, _ = layer.forward(initial(layer), x)
assert not {"torch", "cupy", "array_api_compat"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

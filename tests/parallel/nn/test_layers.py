"""Layers of one rank: against formulas written otherwise, and against finite differences."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from layer_checks import check_gradients, distance, perturbed, run_layer
from pycoll.errors import ArgumentError
from pycoll.parallel.nn import Embedding, LayerNorm, Linear, initial
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.containers import Chain, Residual
from pycoll.parallel.nn.layer import Layer
from pycoll.parallel.nn.layers import GELU, ReLU, Tanh
from pycoll.parallel.nn.positional import Dropout, Position
from pycoll.parallel.nn.transformer import Block, TransformerConfig
from pycoll.parallel.random import Cursor, Key, keep_mask

KEY = Key(3).fold("layer")
CURSOR = Cursor(step=4, sample=2)
LAYERS = {
    "linear": (Linear(5, 3, KEY, dtype="float64"), (2, 3, 5)),
    "linear without bias": (Linear(5, 3, KEY, bias=False, dtype="float64"), (4, 5)),
    "norm": (LayerNorm(6, KEY, dtype="float64"), (2, 3, 6)),
    "position": (Position(7, 4, KEY, dtype="float64"), (2, 5, 4)),
    "gelu": (GELU(), (3, 7)),
    "relu": (ReLU(), (3, 7)),
    "tanh": (Tanh(), (3, 7)),
    "dropout": (Dropout(0.4, KEY, CURSOR), (2, 3, 5)),
    "attention": (CausalAttention(2, 3, KEY), (2, 5, 18)),
    "attention with dropout": (CausalAttention(2, 3, KEY, None, 0.3, CURSOR), (2, 5, 18)),
    "chain": (
        Chain(
            ("first", Linear(4, 6, KEY.fold("first"), dtype="float64")),
            ("inner", Chain(("gelu", GELU()), ("norm", LayerNorm(6, KEY, dtype="float64")))),
            ("last", Linear(6, 4, KEY.fold("last"), dtype="float64")),
        ),
        (3, 4),
    ),
    "block": (
        Block(TransformerConfig(4, 2, dropout=0.2, cursor=CURSOR, dtype="float64"), KEY),
        (2, 3, 4),
    ),
    "residual": (Residual(("only", Linear(4, 4, KEY, dtype="float64"))), (3, 4)),
}


@pytest.mark.parametrize("kind", [Linear, Embedding, Position])
def test_a_name_in_place_of_a_key(kind):
    with pytest.raises(ArgumentError, match=f"{kind.__name__} has key='a'; expected a Key"):
        kind(4, 3, "a").parameters()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_the_forward_pass(name):
    layer, shape = LAYERS[name]
    rng = np.random.default_rng(1)
    assert isinstance(layer, Layer)
    check_gradients(layer, perturbed(layer, rng), rng.standard_normal(shape), rng)


def test_embedding():
    rng = np.random.default_rng(1)
    layer = Embedding(5, 3, KEY, dtype="float64")
    params, x = perturbed(layer, rng), np.array([[0, 4, 4], [2, 0, 4]])
    check_gradients(layer, params, x, rng)
    y, dx, _ = run_layer(layer, params, x, np.ones((2, 3, 3)))
    one_hot = np.eye(5)[x]
    np.testing.assert_array_equal(y, one_hot @ params["weight"])
    assert dx is None


def test_forward_passes_as_formulas():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 3, 5))
    linear = Linear(5, 4, KEY, dtype="float64")
    params = perturbed(linear, rng)
    want = np.einsum("bsi,oi->bso", x, params["weight"]) + params["bias"]
    assert distance(linear.forward(params, x)[0], want) < 1e-15
    norm = LayerNorm(5, KEY, epsilon=0.1, dtype="float64")
    params = perturbed(norm, rng)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1)
    want = want * params["weight"] + params["bias"]
    assert distance(norm.forward(params, x)[0], want) < 1e-14
    exact = np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    assert np.abs(GELU().forward({}, x)[0] - exact).max() < 5e-4  # the tanh form's own error


def naive_attention(x, heads, width):
    """Attention one head, sample and position at a time."""
    b, s, _ = x.shape
    parts = x.reshape(b, s, heads, 3, width)
    y = np.zeros((b, s, heads, width))
    for i in range(b):
        for head in range(heads):
            q, k, v = (parts[i, :, head, j] for j in range(3))
            for t in range(s):
                odds = np.exp(k[: t + 1] @ q[t] / math.sqrt(width))
                y[i, t, head] = odds @ v[: t + 1] / odds.sum()
    return y.reshape(b, s, heads * width)


def test_attention_as_a_loop():
    x = np.random.default_rng(3).standard_normal((2, 7, 3 * 3 * 4))
    got = CausalAttention(3, 4, KEY).forward({}, x)[0]
    assert distance(got, naive_attention(x, 3, 4)) < 1e-14


def test_attention_sees_nothing_of_the_future():
    rng = np.random.default_rng(4)
    layer, x = CausalAttention(2, 4, KEY), rng.standard_normal((1, 6, 24))
    before = layer.forward({}, x)[0]
    x[:, 4:] = rng.standard_normal((1, 2, 24))
    after = layer.forward({}, x)[0]
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.all(before[:, 4:] != after[:, 4:])


def test_dropout_follows_the_cursor():
    cursor = Cursor()
    layer, x = Dropout(0.25, KEY, cursor), np.ones((3, 4, 5), np.float32)
    cursor.at(step=6, sample=8)
    y, _ = layer.forward({}, x)
    want = keep_mask(KEY.fold(6), 0.25, (20, 4, 5))[8:11]
    np.testing.assert_array_equal(y, want * np.float32(1 / 0.75))
    cursor.at(step=7, sample=8)
    assert (layer.forward({}, x)[0] != y).any()
    cursor.training = False
    assert layer.forward({}, x)[0] is x


def test_initial_values():
    params = initial(Linear(400, 300, KEY))
    assert params["weight"].dtype == np.float32
    assert abs(params["weight"].std() * 20 - 1) < 0.02
    assert not params["bias"].any()
    specs = LayerNorm(4, KEY).parameters()
    assert [specs[name].decay for name in ("weight", "bias")] == [False, False]
    assert initial(LayerNorm(4, KEY))["weight"].tolist() == [1, 1, 1, 1]


def test_what_ends_in_the_residual_stream_starts_smaller():
    """By the root of the number of such layers: Radford et al., 2019, section 2.3."""
    params = initial(Block(TransformerConfig(64, 4, depth=8, std=0.02), KEY))
    for name, scale in (("qkv", 1), ("projection", 4), ("expand", 1), ("contract", 4)):
        (weight,) = (params[full] for full in params if full.endswith(f"{name}.weight"))
        assert weight.std() * scale == pytest.approx(0.02, rel=0.03), name


def test_inputs_are_left_alone():
    rng = np.random.default_rng(5)
    for layer, shape in LAYERS.values():
        params, x = perturbed(layer, rng), rng.standard_normal(shape)
        dy = rng.standard_normal(layer.forward(params, x)[0].shape)
        arrays = [x, dy, *params.values()]
        copies = [a.copy() for a in arrays]
        run_layer(layer, params, x, dy)
        for array, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(array, copy)


def test_chain_without_the_gradient_of_its_input():
    """The first layer of a model may be asked for its weights alone."""
    rng = np.random.default_rng(6)
    layer, shape = LAYERS["chain"]
    params, x, dy = perturbed(layer, rng), rng.standard_normal(shape), rng.standard_normal((3, 4))
    want = run_layer(layer, params, x, dy)[2]
    got = layer.backward_weight(params, layer.forward(params, x)[1], dy)
    assert list(got) == list(want) == list(layer.parameters())
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_types_are_kept(dtype):
    rng = np.random.default_rng(7)
    for layer, shape in LAYERS.values():
        params = perturbed(layer, rng, dtype)
        x = rng.standard_normal(shape)
        exact = {name: value.astype(np.float64) for name, value in params.items()}
        dy = rng.standard_normal(layer.forward(exact, x)[0].shape)
        want = run_layer(layer, exact, x, dy)
        got = run_layer(layer, params, x.astype(dtype), dy.astype(dtype))
        for a, b in [
            *zip(got[:2], want[:2], strict=True),
            *((got[2][n], want[2][n]) for n in params),
        ]:
            assert a.dtype == dtype
            assert distance(a, b) < 8 * np.finfo(dtype).eps


def test_large_activations_in_half_precision():
    x = np.array([-6e4, -300, 300, 6e4], np.float16)
    y, saved = GELU().forward({}, x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(GELU().backward_input({}, saved, np.ones_like(x)), x > 0)


def test_positions_add_up_samples_in_float32():
    layer = Position(3, 2, KEY, dtype="float16")
    dy = np.ones((1024, 3, 2), np.float16)
    dy[1::2] = 2.0**-11  # too little to change a sum of float16
    gradient = layer.backward_weight({"weight": np.zeros((3, 2), np.float16)}, slice(0, 3), dy)
    np.testing.assert_array_equal(gradient["weight"], np.float16(512 + 512 / 2**11))


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_without_samples(name):
    layer, shape = LAYERS[name]
    params = perturbed(layer, np.random.default_rng(1))
    x = np.ones((0, *shape[1:]))
    y, dx, gradients = run_layer(layer, params, x, np.ones_like(layer.forward(params, x)[0]))
    assert dx.shape == x.shape
    assert y.shape[0] == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Linear(4, 3, KEY).forward({"weight": np.ones((3, 5))}, np.ones((2, 4))),
            r"layer.weight has shape \(3, 5\), expected \(3, 4\)",
        ),
        (
            lambda: Linear(4, 3, KEY).forward({"weight": np.ones((3, 4))}, np.ones((2, 5))),
            r"the input of layer has shape \(2, 5\), expected \(2, 4\)",
        ),
        (
            lambda: Embedding(4, 3, KEY).forward({"weight": np.ones((4, 3))}, [[0, 4]]),
            r"the input of layer holds 4, expected integers of \[0, 4\)",
        ),
        (
            lambda: Position(4, 3, KEY).forward({"weight": np.ones((4, 3))}, np.ones((1, 5, 3))),
            "positions up to 4, but layer.weight has 4 rows",
        ),
        (lambda: CausalAttention(2, 3, KEY).forward({}, np.ones((1, 2, 9))), "has 9 features"),
        (lambda: LayerNorm(4, KEY).forward({"weight": np.ones(4)}, np.ones((2, 3))), "input of"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def test_the_example_of_the_documentation():
    path = Path(__file__).resolve().parents[3] / "docs" / "layers.md"
    (code,) = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    names = {}
    exec(code, names)
    assert names["gradients"]["weight"].shape == (3, 4)
    assert names["dx"].shape == (2, 4)

"""Tensor-parallel layers give the numbers of the layers of one rank, forward and backward."""

from dataclasses import replace

import numpy as np
import pytest

from layer_checks import distance, part, parts, perturbed, run_layer
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.layers import Embedding, Linear, affine, affine_gradients, initial
from pycoll.parallel.nn.positional import Dropout
from pycoll.parallel.nn.transformer import MLP, Attention, Block, TransformerConfig
from pycoll.parallel.random import Cursor, Key
from pycoll.parallel.tensor import regions
from pycoll.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pycoll.testing import run_threads

KEY = Key(11).fold("block3", "part")
B, S, H, HEADS = 2, 12, 24, 12
BOUNDS = {np.float32: 1e-6, np.float64: 1e-13}
WHOLE, SEQUENCE, FEATURES = None, 1, 2  # how an activation is split


def transformer(part, **options):
    def make(comm=None, dtype="float64", cursor=None):
        extra = options if comm else {}
        config = TransformerConfig(H, HEADS, dtype=dtype, comm=comm, cursor=cursor, **extra)
        return part(config, KEY)

    return make


def linear(kind, size, **options):
    def make(comm=None, dtype="float64"):
        if comm is None:
            return Linear(*size, KEY, dtype=dtype)
        return kind(*size, KEY, comm, dtype=dtype, **options)

    return make


def table(**options):
    def make(comm=None, dtype="float64"):
        if comm is None:
            return Embedding(12, H, KEY, dtype=dtype)
        return VocabParallelEmbedding(12, H, KEY, comm, dtype=dtype, **options)

    return make


SP, KEPT = {"sequence_parallel": True}, {"sequence_parallel": True, "regather": False}
COLUMN, ROW = (H, 36), (36, H)
# name: (maker, how the input is split, how the output is split)
LAYERS = {
    "column": (linear(ColumnParallelLinear, COLUMN), WHOLE, FEATURES),
    "column, gathered": (linear(ColumnParallelLinear, COLUMN, gather_output=True), WHOLE, WHOLE),
    "column, sequence": (linear(ColumnParallelLinear, COLUMN, **SP), SEQUENCE, FEATURES),
    "column, sequence kept": (linear(ColumnParallelLinear, COLUMN, **KEPT), SEQUENCE, FEATURES),
    "row": (linear(RowParallelLinear, ROW), FEATURES, WHOLE),
    "row, sequence": (linear(RowParallelLinear, ROW, **SP), FEATURES, SEQUENCE),
    "embedding": (table(), WHOLE, WHOLE),
    "embedding, sequence": (table(**SP), WHOLE, SEQUENCE),
    "mlp": (transformer(MLP), WHOLE, WHOLE),
    "mlp, sequence": (transformer(MLP, **SP), SEQUENCE, SEQUENCE),
    "attention": (transformer(Attention), WHOLE, WHOLE),
    "attention, sequence": (transformer(Attention, **KEPT), SEQUENCE, SEQUENCE),
    "block": (transformer(Block), WHOLE, WHOLE),
    "block, sequence": (transformer(Block, **SP), SEQUENCE, SEQUENCE),
    "block, sequence kept": (transformer(Block, **KEPT), SEQUENCE, SEQUENCE),
}


class NaiveColumnLinear(ColumnParallelLinear):
    """What tutorials show: gather the output, and let each rank go back through its own part.

    Its forward pass is right. Its backward pass forgets that other ranks used the input too.
    """

    def backward_input(self, params, saved, dy):
        own = regions.GATHER_FEATURES.backward(dy, self.comm)
        return affine(own, params["weight"].T, None)

    def backward_weight(self, params, saved, dy):
        own = regions.GATHER_FEATURES.backward(dy, self.comm)
        return affine_gradients(saved, own, self.bias)


def serial(make, dtype, shape=None):
    """Return parameters, input, output gradient and the results of the layer of one rank."""
    rng = np.random.default_rng(5)
    layer = make(dtype=np.dtype(dtype).name)
    params = perturbed(layer, rng, dtype)
    if isinstance(layer, Embedding):
        x = rng.integers(0, 12, (B, S))
    else:
        features = layer.in_features if isinstance(layer, Linear) else H
        x = rng.standard_normal((B, S, features)).astype(dtype)
    dy = rng.standard_normal(layer.forward(params, x)[0].shape).astype(dtype)
    return params, x, dy, run_layer(layer, params, x, dy)


def check(comm, make, source, split_in, split_out):
    """Run the split layer on one rank; return the relative error of each result by name."""
    params, x, dy, (want_y, want_dx, want_gradients) = source
    layer = make(comm, dy.dtype.name)
    specs = layer.parameters()
    own = parts(params, specs, comm)
    y, dx, gradients = run_layer(layer, own, part(x, split_in, comm), part(dy, split_out, comm))
    assert y.dtype == dy.dtype
    errors = {"output": distance(y, part(want_y, split_out, comm))}
    if want_dx is not None:
        errors["input"] = distance(dx, part(want_dx, split_in, comm))
    for name, spec in specs.items():
        assert own[name].shape == spec.shape
        got = comm.all_reduce(gradients[name]) if spec.sequence else gradients[name]
        errors[name] = distance(got, part(want_gradients[name], spec.tensor_axis, comm))
    return errors


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_as_on_one_rank(n, name, dtype):
    make, split_in, split_out = LAYERS[name]
    source = serial(make, dtype)
    for errors in run_threads(n, check, make, source, split_in, split_out):
        assert max(errors.values()) <= BOUNDS[dtype], errors
        assert len(errors) >= 2 + len(source[0]) - (name.startswith("embedding"))


def test_as_on_one_rank_with_processes(run):
    make, split_in, split_out = LAYERS["block, sequence"]
    source = serial(make, np.float64)
    for errors in run(2, check, make, source, split_in, split_out):
        assert max(errors.values()) <= 1e-13, errors


@pytest.mark.parametrize("n", [2, 4])
def test_the_naive_layer_fails_the_same_test(n):
    make = linear(NaiveColumnLinear, COLUMN, gather_output=True)
    for errors in run_threads(n, check, make, serial(make, np.float64), WHOLE, WHOLE):
        assert errors["output"] <= 1e-13
        assert errors["input"] > 0.1


def test_one_rank_is_the_serial_layer_to_the_bit():
    for make, split_in, split_out in LAYERS.values():
        source = serial(make, np.float32)
        (errors,) = run_threads(1, check, make, source, split_in, split_out)
        assert set(errors.values()) == {0.0}


def test_column_output_is_exact_on_equal_shapes():
    """The product of a part is that of the serial layer on the same rows of the weight."""
    make, *_ = LAYERS["column"]
    params, x, _, _ = serial(make, np.float32)

    def rank(comm):
        layer = make(comm, "float32")
        own = parts(params, layer.parameters(), comm)
        alone = Linear(H, 36 // comm.world_size, KEY)
        return np.array_equal(layer.forward(own, x)[0], alone.forward(own, x)[0])

    assert run_threads(4, rank) == [True] * 4


@pytest.mark.parametrize("n", [2, 4])
def test_initial_parameters_do_not_depend_on_the_mesh(n):
    def rank(comm):
        for make, *_ in LAYERS.values():
            layer, whole = make(comm), initial(make())
            got, want = initial(layer), parts(whole, layer.parameters(), comm)
            assert {k: v.tobytes() for k, v in got.items()} == {
                k: v.tobytes() for k, v in want.items()
            }

    run_threads(n, rank)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_dropout_does_not_depend_on_the_mesh(n, sequence_parallel):
    config = TransformerConfig(H, HEADS, dropout=0.3, dtype="float64", cursor=Cursor(3, 5))
    split_in = SEQUENCE if sequence_parallel else WHOLE

    def make(comm=None, dtype="float64"):
        split = {"comm": comm, "sequence_parallel": sequence_parallel} if comm else {}
        return Block(replace(config, **split), KEY)

    source = serial(make, np.float64)
    without = Block(replace(config, dropout=0.0), KEY).forward(source[0], source[1])[0]
    assert distance(source[3][0], without) > 0.1
    for errors in run_threads(n, check, make, source, split_in, split_in):
        assert max(errors.values()) <= 1e-13, errors


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dropout_masks_are_parts_of_one_mask(n):
    cursor, x = Cursor(3, 5), np.ones((B, S, 3 * H))
    whole = Dropout(0.3, KEY, cursor).forward({}, x)[1]
    weights = CausalAttention(HEADS, 2, KEY, None, 0.3, cursor).forward({}, x)[1].keep

    def rank(comm):
        mine = Dropout(0.3, KEY, cursor, comm).forward({}, part(x, SEQUENCE, comm))[1]
        np.testing.assert_array_equal(mine, part(whole, SEQUENCE, comm))
        heads = CausalAttention(HEADS, 2, KEY, comm, 0.3, cursor)
        mine = heads.forward({}, part(x, FEATURES, comm))[1].keep
        np.testing.assert_array_equal(mine, part(weights, 1, comm))

    run_threads(n, rank)


REGIONS = {
    "copy": (regions.COPY, WHOLE, WHOLE),
    "reduce": (regions.REDUCE, WHOLE, WHOLE),
    "gather features": (regions.GATHER_FEATURES, FEATURES, WHOLE),
    "split features": (regions.SPLIT_FEATURES, WHOLE, FEATURES),
    "gather sequence": (regions.GATHER_SEQUENCE, SEQUENCE, WHOLE),
    "reduce-scatter sequence": (regions.REDUCE_SCATTER_SEQUENCE, WHOLE, SEQUENCE),
    "split sequence": (regions.SPLIT_SEQUENCE, WHOLE, SEQUENCE),
}


@pytest.mark.parametrize("name", ["gather sequence", "reduce-scatter sequence"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_backward_is_the_adjoint_of_forward(name, n):
    """Summed over all ranks, ``<forward(x), y> = <x, backward(y)>``: each rank has its own x, y."""
    region, split_in, split_out = REGIONS[name]
    whole = (2, 6, 4)

    def shape(split, count):
        return tuple(k // count if i == split else k for i, k in enumerate(whole))

    def rank(comm):
        rng = np.random.default_rng(comm.rank)
        x = rng.standard_normal(shape(split_in, comm.world_size))
        y = rng.standard_normal(shape(split_out, comm.world_size))
        return np.vdot(region.forward(x, comm), y), np.vdot(x, region.backward(y, comm))

    left, right = np.sum(run_threads(n, rank), axis=0)
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name", REGIONS)
def test_boundaries_on_whole_arrays(name):
    """Against what the boundary means for the whole activation."""
    region, split_in, split_out = REGIONS[name]
    x = np.arange(2 * 6 * 12.0).reshape(2, 6, 12)

    def rank(comm):
        term = x * (comm.rank + 1) if "reduce" in name else part(x, split_in, comm)
        whole = x * 6 if "reduce" in name else x
        np.testing.assert_array_equal(region.forward(term, comm), part(whole, split_out, comm))

    run_threads(3, rank)

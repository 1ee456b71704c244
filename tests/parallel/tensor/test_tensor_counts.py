"""Collectives and bytes of the tensor-parallel layers are those of the published formulas."""

import numpy as np
import pytest

from layer_checks import Recorder, parts, run_layer, saved_bytes
from pycoll.parallel.gpt import GPT
from pycoll.parallel.nn import LayerNorm, initial
from pycoll.parallel.nn.transformer import MLP, Attention, Block, TransformerConfig
from pycoll.parallel.random import Cursor, Key
from pycoll.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pycoll.testing import run_threads

KEY = Key(0).fold("layer")
B, S, H, V = 2, 8, 16, 12
A = B * S * H * 4  # bytes of an activation in float32
SP, KEPT = {"sequence_parallel": True}, {"sequence_parallel": True, "regather": False}
AR, RS, AG = "all_reduce", "reduce_scatter", "all_gather"


def transformer(part, **options):
    return lambda comm: part(TransformerConfig(H, 4, comm=comm, **options), KEY)


# name: (layer, calls of forward, backward_input, backward_weight), each of an activation
CALLS = {
    "column": (lambda c: ColumnParallelLinear(H, 3 * H, KEY, c), [], [AR], []),
    "column, sequence": (lambda c: ColumnParallelLinear(H, 3 * H, KEY, c, **SP), [AG], [RS], [AG]),
    "column, sequence kept": (
        lambda c: ColumnParallelLinear(H, 3 * H, KEY, c, **KEPT),
        [AG],
        [RS],
        [],
    ),
    "row": (lambda c: RowParallelLinear(H, H, KEY, c), [AR], [], []),
    "row, sequence": (lambda c: RowParallelLinear(H, H, KEY, c, **SP), [RS], [AG], []),
    "embedding": (lambda c: VocabParallelEmbedding(V, H, KEY, c), [AR], [], []),
    "embedding, sequence": (lambda c: VocabParallelEmbedding(V, H, KEY, c, **SP), [RS], [], [AG]),
    "mlp": (transformer(MLP), [AR], [AR], []),
    "attention": (transformer(Attention), [AR], [AR], []),
    "block": (transformer(Block), [AR] * 2, [AR] * 2, []),
    "block, sequence": (transformer(Block, **SP), [AG, RS] * 2, [AG, RS] * 2, [AG] * 2),
    "block, sequence kept": (transformer(Block, **KEPT), [AG, RS] * 2, [AG, RS] * 2, []),
}


def activation(layer, comm, sequence):
    """Return an input of a layer and the gradient of its output, on this rank."""
    rng = np.random.default_rng(0)
    if isinstance(layer, VocabParallelEmbedding):
        x = rng.integers(0, V, (B, S))
    elif isinstance(layer, RowParallelLinear):
        x = rng.random((B, S, H // comm.world_size), np.float32)
    else:
        x = rng.random((B, S // (comm.world_size if sequence else 1), H), np.float32)
    return x


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [2, 4])
def test_calls_of_layers(n, name):
    make, *want = CALLS[name]

    def rank(comm):
        comm = Recorder(comm)
        layer = make(comm)
        params, x = initial(layer), activation(layer, comm, "sequence" in name)
        y, saved = layer.forward(params, x)
        dy, found = np.ones_like(y), [list(comm.calls)]
        for step in (layer.backward_input, layer.backward_weight):
            comm.calls.clear()
            step(params, saved, dy)
            found.append(list(comm.calls))
        return found

    for found in run_threads(n, rank):
        assert found == [[(call, A) for call in calls] for calls in want]


def sent(calls, n):
    """Return the bytes that each rank sends, by the bandwidth-optimal algorithms."""
    return sum((2 if call == AR else 1) * (n - 1) * nbytes // n for call, nbytes in calls)


@pytest.mark.parametrize("n", [2, 4])
def test_sequence_parallelism_sends_the_bytes_of_tensor_parallelism(n):
    """A block: four all-reduces. Korthikanti et al., arXiv 2205.05198, section 4.2.2."""
    found = {}
    for name, options in (("tensor", {}), ("sequence", KEPT), ("regather", SP)):

        def rank(comm, options=options):
            comm = Recorder(comm)
            layer = transformer(Block, **options)(comm)
            x = activation(layer, comm, "sequence_parallel" in options)
            run_layer(layer, initial(layer), x, np.ones_like(x))
            return sent(comm.calls, n)

        (found[name],) = set(run_threads(n, rank))
    assert found["tensor"] == found["sequence"] == 8 * (n - 1) * A // n
    assert found["regather"] == 10 * (n - 1) * A // n


@pytest.mark.parametrize("n", [2, 4])
def test_memory_between_the_split_layers_is_divided(n):
    """What normalisation and dropout save is 1 / n with sequence parallelism; the rest stays."""
    cursor = Cursor()

    def rank(comm, options):
        config = TransformerConfig(H, 4, dropout=0.1, cursor=cursor, comm=comm, **options)
        block = Block(config, KEY)
        x = activation(block, comm, bool(options))
        trace = block.forward(initial(block), x)[1]
        found = {}
        for (name, part), saved in zip(block.layers, trace.saved, strict=True):
            for (inner, _), held in zip(part.layers, saved.saved, strict=True):
                found[f"{name}.{inner}"] = saved_bytes(held)
        return found

    (tensor, *_), (sequence, *_) = run_threads(n, rank, {}), run_threads(n, rank, SP)
    divided = ["attention.norm", "attention.dropout", "mlp.norm", "mlp.dropout"]
    divided += ["attention.qkv", "mlp.expand"]  # regather: only a part of the input is kept
    for name in tensor:
        assert sequence[name] * (n if name in divided else 1) == tensor[name], name
    assert tensor["attention.norm"] == A + B * S * 4  # normalised input, 1 / deviation
    assert tensor["attention.dropout"] == A // 4  # one byte for each number


TOKENS = np.random.default_rng(1).integers(0, V, (B, S + 1))
SIZE = {"features": H, "heads": 4, "depth": 2, "vocabulary": V, "length": S, "dtype": "float64"}


def run_model(model, params):
    """Return the mean loss of a model and its gradients by layer and name."""
    x, loss, trail = TOKENS[:, :-1], model.loss(), []
    for name, layer in model.layers:
        x, saved = layer.forward(params[name], x)
        trail.append(saved)
    total, count, saved = loss.forward(x, TOKENS[:, 1:])
    dy, found = loss.backward(saved, 1 / count), {}
    for (name, layer), saved in zip(reversed(model.layers), reversed(trail), strict=True):
        dx = layer.backward_input(params[name], saved, dy)
        found[name], dy = layer.backward_weight(params[name], saved, dy), dx
    return total / count, found


@pytest.mark.parametrize("options", [{}, SP], ids=["tensor", "sequence"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_whole_model(n, options):
    """Logits and all gradients of a GPT; its collectives are those of its layers."""
    whole = GPT(TransformerConfig(**SIZE), seed=5)
    want_loss, want = run_model(whole, {name: initial(layer) for name, layer in whole.layers})
    assert want_loss == pytest.approx(np.log(V), rel=0.05)

    def rank(comm):
        comm = Recorder(comm)
        model = GPT(TransformerConfig(**SIZE, comm=comm, **options), seed=5)
        loss, found = run_model(model, {name: initial(layer) for name, layer in model.layers})
        calls = list(comm.calls)
        assert loss == pytest.approx(want_loss, rel=1e-13)
        for name, layer in model.layers:
            specs = layer.parameters()
            wanted = parts(want[name], specs, comm)
            assert list(found[name]) == list(wanted)
            for key, spec in specs.items():
                got = found[name][key]
                got = comm.all_reduce(got) if spec.sequence else got
                np.testing.assert_allclose(got, wanted[key], rtol=1e-10, atol=1e-15)
        return calls

    each, three = B * S * H * 8, [(AR, B * S * 8)] * 3
    ends = [(RS, each), (AG, each)] * 5  # embedding and head, and two of each in a block
    split = ends + three + ends + [(AG, each)] * 5  # forward, backward, once more for the weights
    for calls in run_threads(n, rank):
        if n == 1:
            assert calls == []
        elif not options:  # embedding, two for each block and direction, loss, head
            assert calls == [(AR, each)] * 5 + three + [(AR, each)] * 5
        else:
            assert sorted(calls) == sorted(split)


def test_the_norm_is_the_same_layer_in_both():
    """Its parameters are on every rank; only with a split sequence are gradients partial."""
    for sequence in (False, True):
        specs = LayerNorm(H, KEY, sequence_parallel=sequence).parameters().values()
        assert {(spec.tensor_axis, spec.sequence) for spec in specs} == {(None, sequence)}

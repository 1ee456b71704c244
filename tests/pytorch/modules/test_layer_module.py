"""Layers as PyTorch modules: what autograd, checkpoints, the compiler and eval() expect of one."""

import warnings
import weakref

import numpy as np
import pytest

pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from pycoll.parallel.nn import Linear  # noqa: E402
from pycoll.parallel.nn.attention import CausalAttention  # noqa: E402
from pycoll.parallel.nn.containers import Chain  # noqa: E402
from pycoll.parallel.nn.layers import Tanh  # noqa: E402
from pycoll.parallel.nn.positional import Dropout  # noqa: E402
from pycoll.parallel.nn.transformer import Block, TransformerConfig  # noqa: E402
from pycoll.parallel.random import Cursor, Key  # noqa: E402
from pycoll.parallel.tensor import regions  # noqa: E402
from pycoll.parallel.tensor.layers import (  # noqa: E402
    ColumnParallelLinear,
    VocabParallelCrossEntropy,
)
from pycoll.testing import run_processes, run_threads  # noqa: E402
from pycoll.torch.tensor_parallel import (  # noqa: E402
    LayerModule,
    cross,
    vocab_parallel_cross_entropy,
)

KEY = Key(4).fold("layer")
B, S, H, V = 2, 6, 8, 12
DOUBLE = {"dtype": "float64"}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def activation(seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal((B, S, H)))


def block(dropout=0.0, cursor=None):
    return LayerModule(
        Block(TransformerConfig(H, 2, dropout=dropout, cursor=cursor, **DOUBLE), KEY)
    )


@pytest.mark.parametrize("changed", ["input", "parameter"])
def test_a_change_in_place_before_the_backward_pass_is_noticed(changed):
    """What is needed backward is gone; PyTorch says so, as for its own functions."""
    module = LayerModule(Chain(("linear", Linear(H, H, KEY, **DOUBLE)), ("tanh", Tanh())))
    x = activation()
    y = module(x)
    with torch.no_grad():
        (x if changed == "input" else module.get_parameter("linear.weight")).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_checkpoint_lets_go_of_activations(monkeypatch):
    """And gives the same gradients, through what a block keeps in tuples, lists and dicts."""
    module, kept = block(), []
    first = module.layer.layers[0][1]
    forward = first.forward

    def spy(params, x):
        y, saved = forward(params, x)
        kept.append(weakref.ref(saved.saved[0][0]))  # what the normalisation keeps
        return y, saved

    monkeypatch.setattr(first, "forward", spy)
    gradients = []
    for save in (True, False):
        x = activation().requires_grad_()
        y = module(x) if save else checkpoint(module, x, use_reentrant=False)
        assert (kept[-1]() is not None) == save
        gradients.append(torch.autograd.grad((y**2).sum(), [x, *module.parameters()]))
    assert len(kept) == 3  # forward again
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


def test_a_checkpoint_lets_go_of_a_loss(monkeypatch):
    """Of the probabilities, as many as the logits."""
    kept, forward = [], VocabParallelCrossEntropy.forward

    def spy(self, logits, targets):
        total, count, saved = forward(self, logits, targets)
        kept.append(weakref.ref(saved.odds))
        return total, count, saved

    monkeypatch.setattr(VocabParallelCrossEntropy, "forward", spy)

    def rank(comm):
        args = activation().requires_grad_(), torch.zeros(B, S, dtype=torch.int64), comm
        loss = vocab_parallel_cross_entropy(*args)
        assert kept[-1]() is not None
        again = checkpoint(vocab_parallel_cross_entropy, *args, use_reentrant=False)
        assert kept[-1]() is None
        close(torch.autograd.grad(again, args[0]), torch.autograd.grad(loss, args[0]))

    run_threads(1, rank)


@pytest.mark.parametrize("of_loss", [False, True])
def test_a_second_derivative_is_refused(of_loss):
    """Also where the gradient of the output is a constant, with which PyTorch sees nothing."""

    def rank(comm):
        weight = activation().requires_grad_()
        for apply in (
            LayerModule(Linear(H, 3, KEY, **DOUBLE)),
            lambda x: cross(x, regions.COPY, comm),
            lambda x: vocab_parallel_cross_entropy(x, torch.zeros(B, S, dtype=torch.int64), comm),
        ):
            x = activation(1).requires_grad_()
            y = apply(x * weight).sum()
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad((y * y if of_loss else y), x, create_graph=True)

    run_threads(1, rank)


def test_a_layer_that_returns_its_input():
    """The output is a view of it, so that PyTorch refuses to change it in place."""
    module = LayerModule(Dropout(0.5, KEY, Cursor(training=False)))
    x = activation().requires_grad_()
    y = module(x * 1)
    assert y._is_view()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(2)
    close(torch.autograd.grad(module(x).sum(), x)[0], torch.ones_like(x))


def test_eval_turns_dropout_off_and_train_on_again():
    cursor = Cursor()
    module, plain, x = block(0.5, cursor), block(), activation()
    model = torch.nn.Sequential(module)
    dropped = model(x)
    assert not torch.equal(dropped, plain(x))
    model.eval()
    assert not cursor.training
    close(model(x), plain(x))
    model.train()
    assert torch.equal(model(x), dropped)  # the cursor is where it was
    cursor.at(1, 0)
    assert not torch.equal(model(x), dropped)


@pytest.mark.parametrize("kind", ["dropout", "attention"])
def test_eval_of_a_single_layer(kind):
    cursor = Cursor()
    dropout, attention = Dropout(0.5, KEY, cursor), CausalAttention(2, 4, KEY, None, 0.5, cursor)
    LayerModule(dropout if kind == "dropout" else attention).eval()
    assert not cursor.training


class Own(Dropout):
    """A layer with attributes of its own."""

    def __init__(self, layers):
        super().__init__(0.5, KEY, Cursor())
        self.layers = layers


@pytest.mark.parametrize("layers", [3, None, "ab", Own(())])
def test_eval_of_a_layer_whose_layers_are_no_chain(layers):
    layer = Own(layers)
    LayerModule(layer).eval()
    assert not layer.cursor.training


def test_eval_of_a_plain_list_of_layers():
    inner = Own(())
    LayerModule(Own([inner])).eval()
    assert not inner.cursor.training


class Model(torch.nn.Module):
    """Split layers between functions of PyTorch, down to the loss."""

    def __init__(self, comm):
        super().__init__()
        self.comm = comm
        self.block = block()
        self.up = LayerModule(ColumnParallelLinear(H, 2 * H, KEY, comm, **DOUBLE))
        self.head = torch.nn.Linear(2 * H // comm.world_size, V, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(self.head.weight, 0.1)

    def forward(self, x, targets):
        h = torch.tanh(self.up(torch.tanh(self.block(x))) + 1)
        h = cross(self.head(h), regions.COPY, self.comm)
        return vocab_parallel_cross_entropy(h * 2, targets, self.comm) + 1


def test_compiled_models():
    """A compiler that looked inside would fail, or see one rank's numbers for all time."""
    targets = torch.arange(B * S).reshape(B, S) % V

    def rank(comm):
        torch.set_num_threads(1)
        warnings.simplefilter("default")  # PyTorch's own
        numbers = []
        for compiled in (False, True):
            model = Model(comm)
            run = torch.compile(model, backend="eager") if compiled else model
            found = []
            for seed in range(2):
                loss = run(activation(seed), targets)
                found += [loss, *torch.autograd.grad(loss, list(model.parameters()))]
            numbers.append([x.detach().numpy() for x in found])
        return numbers

    for plain, compiled in run_processes(2, rank, timeout=120):
        for got, want in zip(compiled, plain, strict=True):
            np.testing.assert_array_equal(got, want)

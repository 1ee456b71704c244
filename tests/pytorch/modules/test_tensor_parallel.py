"""Split layers as PyTorch modules, against PyTorch's own modules on one rank."""

import numpy as np
import pytest

pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from layer_checks import part  # noqa: E402
from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel.nn import Embedding, LayerNorm, Linear  # noqa: E402
from pycoll.parallel.nn.transformer import Block, TransformerConfig  # noqa: E402
from pycoll.parallel.random import Key  # noqa: E402
from pycoll.parallel.tensor import regions  # noqa: E402
from pycoll.parallel.tensor.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.tensor_parallel import (  # noqa: E402
    LayerModule,
    cross,
    vocab_parallel_cross_entropy,
)

KEY = Key(4).fold("layer")
V, H, B, S = 12, 8, 2, 6
TOKENS = np.random.default_rng(0).integers(0, V, (B, S + 1))
FUNCTIONAL = torch.nn.functional
DOUBLE = {"dtype": "float64"}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_gradients_of_a_layer():
    module = LayerModule(Linear(5, 3, KEY, **DOUBLE))
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    want = FUNCTIONAL.linear(x, module.weight, module.bias)
    close(module(x), want)
    inputs, dy = (x, module.weight, module.bias), torch.randn(4, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(want, inputs, dy)
    for got, gradient in zip(torch.autograd.grad(module(x), inputs, dy), wanted, strict=True):
        close(got, gradient)
    y = module(x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        y.backward()


def reference():
    """A model of PyTorch's own modules on one rank: loss and gradients by name."""
    embedding = torch.nn.Embedding(V, H, dtype=torch.float64)
    up, down = (torch.nn.Linear(*size, dtype=torch.float64) for size in ((H, 4 * H), (4 * H, H)))
    head = torch.nn.Linear(H, V, bias=False, dtype=torch.float64)
    model = torch.nn.ModuleDict({"embedding": embedding, "up": up, "down": down, "head": head})
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(np.random.default_rng(p.numel()).standard_normal(p.shape)))
    x, targets = torch.from_numpy(TOKENS[:, :-1]), torch.from_numpy(TOKENS[:, 1:])
    hidden = embedding(x)
    hidden = hidden + down(FUNCTIONAL.gelu(up(hidden)))
    loss = FUNCTIONAL.cross_entropy(head(hidden).reshape(-1, V), targets.reshape(-1))
    loss.backward()
    return model, loss.detach()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_model_against_pytorch(n, sequence_parallel):
    """Autograd between the split layers; one of them written by hand with `cross`."""
    whole, want = reference()
    values = {k: v.detach().numpy() for k, v in whole.named_parameters()}
    wanted = {k: v.grad for k, v in whole.named_parameters()}
    sp = {"sequence_parallel": sequence_parallel, **DOUBLE}

    def rank(comm):
        model = torch.nn.ModuleDict(
            {
                "embedding": LayerModule(VocabParallelEmbedding(V, H, KEY, comm, **sp)),
                "up": LayerModule(ColumnParallelLinear(H, 4 * H, KEY, comm, **sp)),
                "down": LayerModule(RowParallelLinear(4 * H, H, KEY, comm, **sp), comm),
            }
        )
        specs = {
            f"{name}.{p}": spec
            for name, module in model.items()
            for p, spec in module.layer.parameters().items()
        }
        own = {k: part(values[k], spec.tensor_axis, comm) for k, spec in specs.items()}
        model.load_state_dict({k: torch.tensor(v) for k, v in own.items()})
        head = torch.tensor(part(values["head.weight"], 0, comm), requires_grad=True)
        x = model["embedding"](torch.from_numpy(TOKENS[:, :-1]))
        x = x + model["down"](FUNCTIONAL.gelu(model["up"](x)))
        region = regions.GATHER_SEQUENCE if sequence_parallel else regions.COPY
        logits = cross(x, region, comm) @ head.T
        loss = vocab_parallel_cross_entropy(logits, torch.from_numpy(TOKENS[:, 1:]), comm)
        (3 * loss).backward()
        close(loss.detach(), want)
        for name, p in model.named_parameters():
            axis = specs[name].tensor_axis
            close(p.grad, torch.tensor(3 * part(wanted[name].numpy(), axis, comm)))
        close(head.grad, torch.tensor(3 * part(wanted["head.weight"].numpy(), 0, comm)))

    run_threads(n, rank)


def test_names_of_a_block_and_partial_gradients():
    """Parameters nest as their names do; those on every rank get the gradient of all of them."""
    x = torch.randn(B, S, H, dtype=torch.float64)
    whole = LayerModule(Block(TransformerConfig(H, 2, **DOUBLE), KEY))
    (whole(x) ** 2).sum().backward()

    def rank(comm):
        config = TransformerConfig(H, 2, comm=comm, sequence_parallel=True, **DOUBLE)
        block = Block(config, KEY)
        module = LayerModule(block, comm)
        assert list(dict(module.named_parameters())) == list(dict(whole.named_parameters()))
        (module(x.chunk(2, 1)[comm.rank].contiguous()) ** 2).sum().backward()
        for name, spec in block.parameters().items():
            want = part(whole.get_parameter(name).grad.numpy(), spec.tensor_axis, comm)
            close(module.get_parameter(name).grad, torch.tensor(want))

    run_threads(2, rank)


def test_a_tied_parameter_is_refused_and_shared_by_hand():
    """A module has its own parameters; two of one name would be trained apart."""
    tied = Linear(H, V, KEY.fold("head"), bias=False, tied_to="embedding.weight", **DOUBLE)
    with pytest.raises(ArgumentError, match=r"weight is tied to embedding\.weight, .*by hand: mod"):
        LayerModule(tied)
    embedding = LayerModule(Embedding(V, H, KEY.fold("embedding"), **DOUBLE))
    head = LayerModule(Linear(H, V, KEY.fold("head"), bias=False, **DOUBLE))
    head.weight = embedding.weight
    tokens = torch.from_numpy(TOKENS)
    table = embedding.weight.detach().clone().requires_grad_()
    head(embedding(tokens)).square().sum().backward()
    FUNCTIONAL.linear(FUNCTIONAL.embedding(tokens, table), table).square().sum().backward()
    close(embedding.weight.grad, table.grad)


def test_partial_gradients_need_the_ranks():
    with pytest.raises(ArgumentError, match="gradients of weight, bias are partial: pass comm"):
        LayerModule(LayerNorm(4, KEY, sequence_parallel=True))

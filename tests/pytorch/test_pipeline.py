"""Pipelines of PyTorch modules: the parameters of a plain loop, and the same bits on all meshes."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import SGD, Mesh  # noqa: E402
from pycoll.testing import RankFailed, run_threads  # noqa: E402
from pycoll.torch.pipeline import Pipeline  # noqa: E402

M, STEPS, RATE = 4, 3, 0.1


LOCK = threading.Lock()  # ranks are threads here, and PyTorch has one generator


def network(tied=False):
    with LOCK:
        torch.manual_seed(3)
        return _network(tied)


def _network(tied):
    children = [torch.nn.Linear(8, 8), torch.nn.Tanh()]
    children += [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)), torch.nn.ReLU()]
    children += [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)]
    if tied:
        children[4].weight = children[0].weight
    return torch.nn.Sequential(*children)


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)


def batch(step, place=0):
    rng = np.random.default_rng([step, place])
    return [(rng.standard_normal((6, 8)).astype("f4"), rng.integers(0, 5, 6)) for _ in range(M)]


def plain(tied):
    """Train with PyTorch alone."""
    module = network(tied)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in batch(step):
            total, count = loss(module(torch.from_numpy(x)), torch.from_numpy(y))
            (total / (count * M)).backward()
        optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def piped(comm, schedule, tied=False, zero=0, **axes):
    module = network(tied)
    settings = {"optimizer": SGD(lr=RATE), "zero": zero}
    with (
        Mesh(comm, **axes) as mesh,
        Pipeline(module, loss, mesh, schedule, M, **settings) as engine,
    ):
        for step in range(STEPS):
            engine.step(batch(step, mesh.coordinate("dp")))
        engine.write_back()
        return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_as_pytorch_does(tied):
    want = plain(tied)
    one = run_threads(1, lambda comm: piped(comm, "gpipe", tied, pp=1))[0]
    for name, value in want.items():
        np.testing.assert_allclose(one[name], value, rtol=2e-5, atol=2e-6)
    for schedule, n in (("1f1b", 2), ("zb_h1", 3), ("zb_v", 2)):
        for found in run_threads(n, lambda c, s=schedule, n=n: piped(c, s, tied, 1, pp=n)):
            for name, value in one.items():
                assert found[name].tobytes() == value.tobytes(), (schedule, name)


def test_sharded_over_two_ranks():
    for zero in (2, 3):
        one = run_threads(2, lambda c, z=zero: piped(c, "gpipe", False, z, dp=2, pp=1))[0]
        for found in run_threads(4, lambda c, z=zero: piped(c, "1f1b", False, z, dp=2, pp=2)):
            for name, value in one.items():
                assert found[name].tobytes() == value.tobytes(), (zero, name)


def test_without_a_flush():
    """Autograd of PyTorch refuses parameters that changed under it; these are handed in."""
    found = run_threads(2, lambda comm: piped(comm, "pipedream", pp=2))
    for name, value in found[0].items():
        assert np.isfinite(value).all()
        assert found[1][name].tobytes() == value.tobytes()


def test_what_is_refused():
    def rank(comm):
        with Mesh(comm, pp=1) as mesh, pytest.raises(ArgumentError, match="is a Linear; expected"):
            Pipeline(torch.nn.Linear(2, 2), loss, mesh)
        chain = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with Mesh(comm, pp=1) as mesh, pytest.raises(ArgumentError, match="'all': autograd keeps"):
            Pipeline(chain, loss, mesh, offload="all")

    run_threads(1, rank)

    class Two(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    def step(comm):
        chain = torch.nn.Sequential(torch.nn.Linear(8, 8), Two(8, 5))
        with Mesh(comm, pp=1) as mesh, Pipeline(chain, loss, mesh, micro_batches=M) as engine:
            engine.step(batch(0))

    with pytest.raises(RankFailed, match="child 1 returned a tuple; children pass one tensor on"):
        run_threads(1, step)

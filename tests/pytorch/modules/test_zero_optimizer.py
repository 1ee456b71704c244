"""PyTorch optimizers with states divided over ranks, against PyTorch on one rank."""

import copy
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError, MismatchError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402

STEPS, N = 10, 3
KINDS = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def new(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(5, 5)).double()


PROTOTYPES = [new(seed) for seed in range(N)]  # the generator is shared by threads


def make(seed=0):
    return copy.deepcopy(PROTOTYPES[seed])


def sample(step, rank, part):
    rng = np.random.default_rng([step, rank, part])
    return torch.tensor(rng.standard_normal((4, 7))), torch.tensor(rng.integers(0, 5, 4))


def loss(net, pair):
    return torch.nn.functional.cross_entropy(net(pair[0]), pair[1])


def plain(kind, settings, clip):
    net = make()
    optimizer = kind(net.parameters(), **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(N):
            for part in range(2):
                (loss(net, sample(step, rank, part)) / N).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        for p in net.parameters():
            p.grad *= min(1.0, clip / float(norm))
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()], float(norm)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_it_steps_as_the_optimizer_does(kind, settings, set_to_none):
    expected, norm = plain(kind, settings, 0.5)

    def rank(comm):
        net = make(comm.rank)  # all start from rank 0's
        options = {"clip_norm": 0.5, "bucket_bytes": 500, **settings}
        optimizer = ZeroOptimizer(kind, net, comm, **options)
        for step in range(STEPS):
            for part in range(2):
                loss(net, sample(step, comm.rank, part)).backward()
            seen = optimizer.step()
            (net if set_to_none else optimizer).zero_grad()
        states = sum(
            x.numel() for s in optimizer.inner.state.values() for x in s.values() if x.ndim
        )
        sent = optimizer.ledger.sent_since(Counter())
        wire = sent["gradient"] + sent["parameter"]
        padded = sum(flat.layout.padded for flat in optimizer._buckets)
        optimizer.close()
        return [p.detach().numpy().copy() for p in net.parameters()], seen, states, wire, padded

    moments = {"AdamW": 2}.get(kind.__name__, 1)
    for found, seen, states, wire, padded in run_threads(N, rank):
        assert seen == pytest.approx(norm, rel=1e-10)
        for value, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-9, atol=1e-12)
        assert states == moments * padded // N
        assert wire == STEPS * 2 * (N - 1) * padded * 8 // N


def test_gradients_that_are_not_finite_change_nothing():
    def rank(comm):
        net = make()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1)
        x, t = sample(0, comm.rank, 0)
        loss(net, (x * (float("nan") if comm.rank else 1.0), t)).backward()
        with pytest.raises(ArgumentError, match=r"rank 1 has gradients .*, of 0\.bias, 0\.w"):
            optimizer.step()
        for p in net.parameters():
            p.grad.fill_(1e308)
        with pytest.raises(ArgumentError, match=r"not taken: [1-9]\d* sums are not finite"):
            optimizer.step()
        return all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    assert run_threads(2, rank) == [True, True]


class ByNorm(torch.optim.SGD):
    """Divides a gradient by its norm, as LARS does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


ODD_KINDS = {
    "norm": (ByNorm, {"lr": 0.1}, "depends on the others"),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, "depends on the others"),
    "closure": (torch.optim.LBFGS, {"lr": 0.1}, "TypeError: .*closure"),
}


@pytest.mark.parametrize("name", ODD_KINDS)
@pytest.mark.parametrize("in_group", [True, False])
def test_an_optimizer_that_mixes_elements_is_refused(name, in_group):
    """In vectors of many parameters it would give other numbers than without ranks."""
    kind, settings, fault = ODD_KINDS[name]

    def rank(comm):
        net = make()
        groups = [{"params": list(net.parameters()), **(settings if in_group else {})}]
        with pytest.raises(ArgumentError, match=f"{kind.__name__} cannot step vectors.*{fault}"):
            ZeroOptimizer(kind, net, comm, groups=groups, **({} if in_group else settings))
        return True

    assert run_threads(2, rank) == [True, True]


def test_a_clip_norm_that_cannot_be_used():
    def rank(comm):
        with pytest.raises(ArgumentError, match="clip_norm"):
            ZeroOptimizer(torch.optim.SGD, make(), comm, lr=0.1, clip_norm=-1.0)
        return True

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("same", [True, False])
def test_settings_of_an_optimizer(same):
    def rank(comm):
        optimizer = ZeroOptimizer(torch.optim.SGD, make(), comm, lr=0.1)
        (group,) = optimizer.param_groups
        group["hook"] = lambda x: x  # the text of which is its address
        group["lr"] = torch.tensor(0.2 if same or comm.rank else 0.3)
        if same:
            return optimizer.step() == 0
        with pytest.raises(MismatchError, match=r"rank 0: .*lr=0.3.*rank 1: .*lr=0.2"):
            optimizer.step()
        return True

    assert run_threads(2, rank) == [True, True]


def test_parameters_that_were_given_other_memory():
    def rank(comm, moving):
        net = make()
        optimizer = ZeroOptimizer(torch.optim.AdamW, net, comm, lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            loss(net, sample(step, comm.rank, 0)).backward()
            optimizer.step()
            for p in net.parameters() if moving else []:
                p.data = p.detach().t().clone().t() if p.ndim == 2 else p.detach().clone()
        return [p.detach().numpy().copy() for p in net.parameters()]

    expected, found = (run_threads(2, rank, moving) for moving in (False, True))
    for value, right in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        np.testing.assert_array_equal(value, right)


def test_parameters_of_another_type_are_refused():
    def rank(comm):
        net = make()
        optimizer = ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1)
        net.float()
        with pytest.raises(ArgumentError, match=r"parameter .* of type torch.float32"):
            optimizer.step()
        return True

    assert run_threads(2, rank) == [True, True]


def test_sparse_gradients():
    def rank(comm):
        net = torch.nn.Embedding(7, 3, sparse=True)
        net.weight.data[...] = 0
        optimizer = ZeroOptimizer(torch.optim.SGD, net, comm, lr=1.0)
        net.zero_grad()  # None: the next one is sparse
        net(torch.tensor([comm.rank, 2])).sum().backward()
        optimizer.step()
        return net.weight.detach()[:, 0].tolist()

    assert run_threads(2, rank) == [[-0.5, -0.5, -1, 0, 0, 0, 0]] * 2


def test_zero_grad_drops_gradients_that_lie_elsewhere():
    def rank(comm):
        net = make()
        optimizer = ZeroOptimizer(torch.optim.SGD, net, comm, lr=1.0)
        net.zero_grad()  # None: autograd makes new ones
        loss(net, sample(0, comm.rank, 0)).backward()
        optimizer.zero_grad()
        return optimizer.step()

    assert run_threads(2, rank) == [0, 0]

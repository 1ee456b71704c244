"""PyTorch modules trained on many ranks, against PyTorch on one."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import (  # noqa: E402
    SGD,
    AdamW,
    Mesh,
    estimate,
)
from pycoll.testing import run_processes, run_threads  # noqa: E402
from pycoll.torch.data_parallel import DataParallel  # noqa: E402

STEPS = 20

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    """A small classifier with a parameter of its own, a tied weight and a branch seldom taken."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(12))
        self.first = torch.nn.Linear(7, 12)
        self.again = torch.nn.Linear(12, 12)
        self.more = torch.nn.Linear(12, 12)
        self.more.weight = self.again.weight
        self.seldom = torch.nn.Linear(12, 12)
        self.last = torch.nn.Linear(12, 5)
        self.to(dtype)

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.gain
        h = torch.tanh(self.more(torch.tanh(self.again(h))))
        if x[0, 0] > 1:
            h = h + self.seldom(h)
        return self.last(h)


torch.manual_seed(0)
PROTOTYPE = Net()  # the generator is shared by threads


def net(dtype=torch.float32):
    return copy.deepcopy(PROTOTYPE).to(dtype)


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)


def data(step, total, dtype=torch.float32):
    rng = np.random.default_rng(step)
    return [
        (
            torch.tensor(rng.standard_normal((6, 7)), dtype=dtype),
            torch.tensor(rng.integers(0, 5, 6)),
        )
        for _ in range(total)
    ]


def plain(total, dtype):
    module = net(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.01)
    for step in range(STEPS):
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        for sample in data(step, total, dtype):
            value, _ = loss(module(sample[0]), sample[1])
            (value / (6 * total)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        for p in module.parameters():
            p.grad *= min(1.0, 0.1 / float(norm))
        optimizer.step()
    return {name: p.detach().numpy() for name, p in module.named_parameters()}, float(norm)


def train(comm, total, zero, dtype=torch.float32, nbytes=1000):
    options = {
        "optimizer": AdamW(lr=0.01),
        "clip_norm": 0.1,
        "bucket_bytes": nbytes,
        "order": "rank",
    }
    module = net(dtype)
    engine = DataParallel(module, loss, Mesh(comm, dp=-1), zero=zero, **options)
    k = total // comm.world_size
    for step in range(STEPS):
        report = engine.step(data(step, total, dtype)[comm.rank * k : (comm.rank + 1) * k])
    found = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    gathered = engine.gather()
    assert all((gathered[k if "." in k else f"module.{k}"] == v).all() for k, v in found.items())
    return found, report.grad_norm, report.bytes


@pytest.mark.parametrize("given", [lambda x: x.sum(), lambda x: None, lambda x: (x.sum(),)])
def test_a_loss_that_is_not_a_sum_and_a_number(given):
    """As those of PyTorch are, which return the mean alone."""

    def rank(comm):
        engine = DataParallel(net(), lambda output, targets: given(output), Mesh(comm, dp=-1))
        with pytest.raises(ArgumentError, match=r"loss returned .*; expected two things, the sum"):
            engine.step(data(0, 1))

    run_threads(1, rank)


def test_an_optimizer_of_pytorch():
    def rank(comm):
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        with pytest.raises(ArgumentError, match=r"=SGD \( .* of pycoll\.parallel") as caught:
            DataParallel(net(), loss, Mesh(comm, dp=-1), optimizer=optimizer)
        assert "\n" not in str(caught.value)

    run_threads(1, rank)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_it_trains_as_torch_does(zero):
    expected, norm = plain(4, torch.float64)
    for found, seen, _ in run_threads(2, train, 4, zero, torch.float64):
        assert seen == pytest.approx(norm, rel=1e-10)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_bits_do_not_depend_on_the_ranks(zero):
    (expected, norm, _), *_ = run_processes(1, train, 3, 0, torch.float32, 1 << 20)
    for found, seen, _ in run_processes(3, train, 3, zero):
        assert seen == norm
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_bytes_are_those_of_the_estimate():
    count = sum(p.numel() for p in net().parameters())
    sent = run_threads(2, train, 2, 1)[0][2]
    told = estimate(count, mesh={"dp": 2}, zero=1).wire
    assert told["gradient"] <= sent["gradient"] <= told["gradient"] + 64 * 8


def test_predictions_and_state():
    def rank(comm):
        engine = DataParallel(net(), loss, Mesh(comm, dp=2), zero=1)
        engine.step(data(0, 1))
        other = DataParallel(net(), loss, Mesh(comm, dp=2))
        other.load_state_dict(engine.state_dict())
        x = data(1, 1)[0][0]
        return torch.equal(engine.predict(x), other.predict(x))

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (net, {"zero": 3}, "zero=3 needs layers"),
        (net, {"device": "cuda"}, "modules are trained on CPUs"),
        (lambda: net(torch.bfloat16), {}, "parameters are torch.bfloat16"),
        (torch.nn.ReLU, {}, "parameters are none"),
    ],
)
def test_what_cannot_be_trained_is_refused(make, options, text):
    def rank(comm):
        with pytest.raises(ArgumentError, match=text):
            DataParallel(make(), loss, Mesh(comm, dp=1), **options)

    run_threads(1, rank)


def squares(output, targets):
    return ((output - targets) ** 2).sum(), len(targets)


def few(rank, width=3):
    rng = np.random.default_rng(rank)
    return tuple(torch.tensor(rng.standard_normal((2, width)), dtype=torch.float32) for _ in "xt")


class Wrapped(torch.nn.Module):
    """Has parameters of the same names as a layer that is called "module"."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3, 3), 0.5))
        self.bias = torch.nn.Parameter(torch.full((3,), 0.25))

    def forward(self, x):
        return self.module(x) @ self.weight + self.bias


WRAPPED = Wrapped()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_layer_called_module(zero):
    def rank(comm):
        net = copy.deepcopy(WRAPPED)
        DataParallel(net, squares, Mesh(comm, dp=-1), zero=zero, optimizer=SGD(lr=0.1)).step(
            [few(comm.rank)]
        )
        return [p.detach().numpy().copy() for p in net.parameters()]

    net = copy.deepcopy(WRAPPED)
    (sum(squares(net(x), t)[0] for x, t in (few(0), few(1))) / 4).backward()
    for found in run_threads(2, rank):
        for value, p in zip(found, net.parameters(), strict=True):
            np.testing.assert_allclose(value, (p - 0.1 * p.grad).detach().numpy(), rtol=1e-5)


class Twice(torch.nn.Module):
    """Goes backward through one layer in two passes, one inside the other."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(checkpoint(self.layer, self.layer(x), use_reentrant=True))


TWICE = Twice()


def test_a_second_gradient_is_refused():
    def rank(comm):
        net = copy.deepcopy(TWICE)
        engine = DataParallel(net, squares, Mesh(comm, dp=-1))
        with pytest.raises(ArgumentError, match="got another gradient"):
            engine.step([few(comm.rank)])
        return True

    assert run_processes(2, rank) == [True, True]


@pytest.mark.parametrize("when", ["never", "before", "between", "inside"])
def test_a_backward_pass_of_ones_own(when):
    """Its gradients are found where PyTorch puts them, and the step does not count them."""
    net = copy.deepcopy(WRAPPED)
    (sum(squares(net(x), t)[0] for x, t in (few(0), few(1))) / 4).backward()

    def rank(comm):
        own, twin = copy.deepcopy(WRAPPED), copy.deepcopy(WRAPPED)
        x, t = few(comm.rank)
        (twin(x) ** 4).sum().backward()
        twin.bias.grad = None

        def go_back(now):
            if now == when:
                (own(x) ** 4).sum().backward()
                own.bias.grad = None  # beside those that are there

        def criterion(output, targets):
            go_back("inside")
            return squares(output, targets)

        go_back("before")
        engine = DataParallel(own, criterion, Mesh(comm, dp=-1), optimizer=SGD(lr=0.1))
        go_back("between")
        engine.step([(x, t)])
        for p, q in zip(own.parameters(), twin.parameters(), strict=True):
            if when == "never" or q.grad is None:
                assert p.grad is None
            else:
                assert torch.equal(p.grad, q.grad)
        return [p.detach().numpy().copy() for p in own.parameters()]

    for found in run_threads(2, rank):
        for value, p in zip(found, net.parameters(), strict=True):
            np.testing.assert_allclose(value, (p - 0.1 * p.grad).detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_alone(zero, where):
    """The others hear of it at once, nobody takes the step, and all go on."""

    def rank(comm, fails):
        module, settings = net(), {"bucket_bytes": 256, "optimizer": SGD(lr=0.1)}
        engine = DataParallel(module, loss, Mesh(comm, dp=-1), zero=zero, **settings)
        inputs = [few(2 * comm.rank + i, 7)[0] for i in range(2)]
        samples = [(x, x.argmax(dim=1) % 5) for x in inputs]
        if fails:
            layer, hook = module.first if where == "backward" else module.last, None
            if comm.rank == 1:
                fail = lambda *_: 1 / 0  # noqa: E731
                hook = (
                    layer.weight.register_hook(fail)
                    if where == "backward"
                    else layer.register_forward_hook(fail)
                )
            with pytest.raises(ArgumentError if hook is None else ZeroDivisionError, match="zero"):
                engine.step(samples)
            if hook is not None:
                hook.remove()
        engine.step(samples)
        return engine.gather()

    (wanted, *_), found = run_threads(3, rank, False), run_threads(3, rank, True)
    for each in found:
        for name, value in wanted.items():
            np.testing.assert_array_equal(each[name], value)


def test_a_rank_may_use_no_parameter_and_a_failed_step_leaves_nothing():
    def rank(comm):
        net = copy.deepcopy(WRAPPED)
        engine = DataParallel(net, squares, Mesh(comm, dp=-1), optimizer=SGD(lr=0.1))
        hook = net.module.bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step([few(comm.rank)])
        hook.remove()
        net.forward = net.module.forward if comm.rank == 0 else lambda x: x
        before = net.weight.detach().clone()
        engine.step([few(comm.rank)])
        return torch.equal(net.weight, before)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_that_were_given_other_memory(zero):
    def rank(comm, moving):
        module = net()
        engine = DataParallel(module, loss, Mesh(comm, dp=-1), zero=zero, optimizer=AdamW(lr=0.01))
        for step in range(3):
            engine.step(data(step, 2)[comm.rank : comm.rank + 1])
            for p in module.parameters():
                p.data = p.detach() * 2 if moving else p.detach().mul_(2)
        return [*engine.gather().values(), *engine.state_dict()["parameters"].values()]

    expected, found = (run_threads(2, rank, moving) for moving in (False, True))
    for value, right in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        np.testing.assert_array_equal(value, right)

"""Checkpoints of `ZeroOptimizer`: PyTorch's own, for any number of ranks."""

import copy
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402
from zero_cases import (  # noqa: E402
    SETTINGS,
    STEPS,
    N,
    check,
    divided,
    loss,
    make,
    one_group,
    train,
    two_groups,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def save(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load(raw):
    return torch.load(io.BytesIO(raw), weights_only=True)


KINDS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_checkpoints(kind, changes, groups):
    """Saved by two ranks, they are PyTorch's, and go on with one, two or three ranks."""
    plain_net = make()
    plain = kind(groups(plain_net), **{**SETTINGS, **changes})
    train(plain_net, plain, 0, 3, range(N))

    def first(comm):
        net = make()
        optimizer = divided(net, comm, groups, kind, **changes)
        train(net, optimizer, 0, 3, [comm.rank])
        raw = save([net.state_dict(), optimizer.state_dict()])
        train(net, optimizer, 3, STEPS, [comm.rank])
        return raw, values(net)

    (raw, final), (other, _) = run_threads(N, first)
    assert raw == other
    weights, saved = load(raw)
    expected = plain.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert list(saved["state"]) == list(expected["state"])
    for i, state in expected["state"].items():
        assert saved["state"][i].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(saved["state"][i][key], value, rtol=1e-9, atol=1e-12)

    net = make()
    net.load_state_dict(weights)
    alone = kind(groups(net), lr=1.0)
    alone.load_state_dict(load(raw)[1])  # which keeps the tensors, and changes them
    train(net, alone, 3, STEPS, range(N))
    check(values(net), final)

    def second(comm):
        net = make()
        net.load_state_dict(weights)
        optimizer = divided(net, comm, groups, kind, lr=1.0, bucket_bytes=2000)
        optimizer.load_state_dict(saved)
        again = save([net.state_dict(), optimizer.state_dict()])
        ranks = [comm.rank] if comm.world_size == N else range(N)
        train(net, optimizer, 3, STEPS, ranks)
        return again, values(net)

    for n in (1, 2, 3):
        for again, found in run_threads(n, second):
            check_same(load(again)[1], saved)
            check(found, final)
            if n == N and kind is not torch.optim.NAdam:  # of which PyTorch loads another type
                assert all(map(np.array_equal, found, final))


def check_same(one, two):
    assert one["param_groups"] == two["param_groups"]
    for i, state in two["state"].items():
        for key, value in state.items():
            assert value is one["state"][i][key] or torch.equal(value, one["state"][i][key])


def test_checkpoints_that_do_not_fit():
    def rank(comm):
        net = make()
        optimizer = divided(net, comm, one_group, bucket_bytes=1 << 20)
        train(net, optimizer, 0, 1, [comm.rank])
        before = optimizer.state_dict()
        for key, value, message in [
            ("exp_avg", torch.zeros(3), r"exp_avg of 3.bias is \(3,\), expected shape \(5,\)"),
            ("step", torch.tensor(9.0), r"step of .* is 1.0, of .* 9.0|is 9.0, of .* 1.0"),
        ]:
            bad = copy.deepcopy(before)
            bad["state"][6][key] = value
            bad["param_groups"][0]["lr"] = 7.0
            with pytest.raises(ArgumentError, match=message):
                optimizer.load_state_dict(bad)
            check_same(optimizer.state_dict(), before)
        with pytest.raises(ValueError, match="size of optimizer's group"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        del before["state"][6]  # a parameter that PyTorch alone has never stepped
        optimizer.load_state_dict(before)
        return optimizer.state_dict()["state"][6]["exp_avg"].tolist()

    assert run_threads(N, rank) == [[0.0] * 5] * N


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_states_of_frozen_parameters(kind):
    """Adagrad has states of them from the start; a gradient from before does not step them."""

    def frozen():
        net = make()
        loss(net, 0, 0).backward()
        net[0].requires_grad_(False)
        return net

    net = frozen()
    net.zero_grad()
    plain = kind(one_group(net), **SETTINGS)
    train(net, plain, 0, 3, range(N))
    expected = plain.state_dict()

    def rank(comm):
        net = frozen()
        before = net[0].weight.detach().clone()
        optimizer = divided(net, comm, one_group, kind)
        train(net, optimizer, 0, 3, [comm.rank])
        saved = optimizer.state_dict()
        assert torch.equal(net[0].weight, before)
        assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
        again = copy.deepcopy(expected)
        for value in again["state"].get(1, {}).values():
            value += 1
        optimizer.load_state_dict(again)
        check_same(optimizer.state_dict(), again)
        return saved

    for saved in run_threads(N, rank):
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for i, state in expected["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(saved["state"][i][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
def test_scalars_only(kind):
    """What counts steps is told from what belongs to an element, which has no axis either."""

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.tensor(x).double()) for x in (1.5, 0.5))

    def steps(net, optimizer):
        for x in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            ((net.a * x + net.b) ** 2).backward()
            optimizer.step()
        return values(net)

    def rank(comm):
        net = Line()
        optimizer = ZeroOptimizer(kind, net, comm, lr=0.1)
        steps(net, optimizer)
        weights, saved = copy.deepcopy(net.state_dict()), optimizer.state_dict()
        expected = steps(net, optimizer)
        other = Line()
        other.load_state_dict(weights)
        loaded = ZeroOptimizer(kind, other, comm, lr=0.1)
        loaded.load_state_dict(saved)
        for found, right in zip(steps(other, loaded), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-6)  # of another type once loaded

    run_threads(N, rank)

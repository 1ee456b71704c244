"""Checkpoints of `ZeroOptimizer`: PyTorch's own, for any number of ranks."""

import copy
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from zero_cases import (  # noqa: E402
    SETTINGS,
    STEPS,
    N,
    check,
    divided,
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

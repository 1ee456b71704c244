"""What ranks give to `ZeroOptimizer`: compared before anything is moved."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError, MismatchError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402

torch.manual_seed(0)
PROTOTYPE = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

pytestmark = pytest.mark.usefixtures("one_thread")


def frozen(net, rank):
    net[rank].requires_grad_(False)


def frozen_and_left_out(net, rank):
    net[rank].requires_grad_(False)
    return {"groups": [{"params": net[1].parameters()}]}


def swapped(net, rank):
    mine, other = net[rank].parameters(), net[1 - rank].parameters()
    return {"groups": [{"params": mine}, {"params": other, "weight_decay": 0.1}]}


def reversed_(net, rank):
    return {"groups": [{"params": list(net.parameters())[:: 1 - 2 * rank]}]}


def wide(net, rank):
    net[rank].double()


def clipped(net, rank):
    return {"clip_norm": 1.0 + rank}


def cut(net, rank):
    return {"bucket_bytes": 64 << rank}


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        (frozen, r"group 0: 0\.weight, .*frozen", r"group 0: 0\.weight, .*trained"),
        (frozen_and_left_out, r"group 0: 1\.weight, .*trained", r"group 0: 1\.weight, .*frozen"),
        (swapped, r"group 0: 0\.weight", r"group 0: 1\.weight"),
        (reversed_, r"group 0: 0\.weight", r"group 0: 1\.bias"),
        (wide, "torch.float64 on cpu", "torch.float32 on cpu"),
        (clipped, "clip_norm=1.0", "clip_norm=2.0"),
        (cut, "bucket_bytes=64", "bucket_bytes=128"),
    ],
)
def test_ranks_with_other_parameters_groups_or_settings(change, first, second):
    def rank(comm):
        net = copy.deepcopy(PROTOTYPE)
        if comm.rank:  # what would be copied over
            with torch.no_grad():
                [p.add_(1) for p in net.parameters()]
        options = change(net, comm.rank) or {}
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(MismatchError, match=rf"rank 0: .*{first}.*; rank 1: .*{second}"):
            ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1, **options)
        return all(torch.equal(a, p) for a, p in zip(before, net.parameters(), strict=True))

    assert run_threads(2, rank) == [True, True]


def test_a_group_that_lacks_a_parameter_on_one_rank():
    """Also what one rank alone would refuse reaches the others."""

    def rank(comm):
        net = copy.deepcopy(PROTOTYPE)
        groups = [{"params": net[0].parameters() if comm.rank else net.parameters()}]
        with pytest.raises(MismatchError, match=r"rank 1: no group: 1\.weight"):
            ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1, groups=groups)
        groups = [{"params": net[0].parameters()}]
        with pytest.raises(ArgumentError, match=r"1\.weight, 1\.bias are in no group"):
            ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1, groups=groups)
        return True

    assert run_threads(2, rank) == [True, True]


class OtherSGD(torch.optim.SGD):
    """Steps like its base, for all that anybody could tell."""


def test_ranks_with_another_optimizer():
    def rank(comm):
        kind = OtherSGD if comm.rank else torch.optim.SGD
        with pytest.raises(MismatchError, match="rank 0: optimizer=SGD; rank 1: optimizer=OtherSG"):
            ZeroOptimizer(kind, copy.deepcopy(PROTOTYPE), comm, lr=0.1)
        return True

    assert run_threads(2, rank) == [True, True]


class Curve:
    """A setting that is an object, whose text is its address."""

    def __init__(self, power):
        self.power, self._cache = power, object()


SETTINGS = {
    "list": lambda rank: [0.9, 0.999 - rank],
    "tensors in a list": lambda rank: [torch.tensor(0.9 + 1e-6 * rank)],
    "dictionary": lambda rank: {"warm": 10, "cold": rank},
    "object": lambda rank: Curve(rank),
    "function": lambda rank: len if rank else max,
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("same", [True, False])
def test_settings_of_any_kind(kind, same):
    """They are compared by what is in them, not by where they lie."""

    def rank(comm):
        optimizer = ZeroOptimizer(torch.optim.SGD, copy.deepcopy(PROTOTYPE), comm, lr=0.1)
        optimizer.param_groups[0]["extra"] = SETTINGS[kind](0 if same else comm.rank)
        if same:
            return optimizer.step() == 0
        with pytest.raises(MismatchError, match=r"rank 0: .*extra=.*rank 1: .*extra="):
            optimizer.step()
        return True

    assert run_threads(2, rank) == [True, True]

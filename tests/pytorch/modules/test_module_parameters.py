"""Where the parameters of a module lie, with both adapters: in the buckets, and nowhere else."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import Mesh  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.data_parallel import DataParallel  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402

PROTOTYPE = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))  # for all threads
X = torch.ones(2, 4)

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(net, comm, start="check"):
    return DataParallel(net, lambda y, _: (y.sum(), len(y)), Mesh(comm, dp=-1), start=start, zero=1)


def optimizer_of(net, comm):
    return ZeroOptimizer(torch.optim.SGD, net, comm, lr=0.1)


def step(owner):
    owner.step(*[[(X, X)]] * isinstance(owner, DataParallel))


def gather(owner):
    owner.gather()


def save(owner):
    owner.state_dict()


def load(owner):
    owner.load_state_dict({})


CALLS = [
    (engine_of, step, "the step was not taken"),
    (optimizer_of, step, "the step was not taken"),
    (engine_of, gather, "parameters were not gathered"),
    (engine_of, save, "there is no state to save"),
    (engine_of, load, "the saved state was not loaded"),
]


def unfreeze(net):
    net[0].bias.requires_grad_(True)


def widen(net):
    net[1].weight.data = net[1].weight.data.double()


@pytest.mark.parametrize(("make", "call", "text"), CALLS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (unfreeze, r"parameters 0\.bias, frozen when the"),
        (widen, r"parameter 1\.weight of type torch.float64"),
    ],
)
def test_what_one_rank_cannot_go_on_with_all_hear_of(make, call, text, change, told):
    """And once it is put right, training goes on."""

    def rank(comm):
        net = copy.deepcopy(PROTOTYPE)
        net[0].bias.requires_grad_(False)
        owner, weight = make(net, comm), net[1].weight
        net(X).sum().backward()
        data = weight.data
        if comm.rank == 1:
            change(net)
        with pytest.raises(ArgumentError, match=rf"{text}: rank 1 has {told}"):
            call(owner)
        net[0].bias.requires_grad_(False)
        weight.data = data
        before = weight.detach().clone()
        step(owner)
        return torch.equal(before, weight)

    assert run_threads(2, rank) == [False, False]


def homes(owner):
    """Yield entries of layouts, and the vectors that they lie in."""
    if isinstance(owner, DataParallel):
        return [(e, b.parameter.data) for b in owner.buckets for e in b.layout.entries]
    return [(e, flat.parameter) for flat in owner._buckets for e in flat.layout.entries]


@pytest.mark.parametrize("start", ["check", "broadcast", None])
def test_there_is_no_second_copy_of_the_parameters(start):
    def rank(comm):
        net = copy.deepcopy(PROTOTYPE)
        owner = engine_of(net, comm, start) if start else optimizer_of(net, comm)
        pairs = [(e.parameter.spec, data) for e, data in homes(owner)]
        return [np.shares_memory(spec.init(spec.shape), data) for spec, data in pairs]

    assert run_threads(2, rank) == [[True] * 4] * 2

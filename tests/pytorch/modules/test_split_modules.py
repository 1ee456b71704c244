"""Modules with layers split over ranks, trained over a mesh, against the same on one rank."""

import numpy as np
import pytest

pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError, MismatchError  # noqa: E402
from pycoll.parallel import AdamW, Mesh  # noqa: E402
from pycoll.parallel.nn import LayerNorm  # noqa: E402
from pycoll.parallel.random import Key  # noqa: E402
from pycoll.parallel.tensor import regions  # noqa: E402
from pycoll.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.data_parallel import DataParallel  # noqa: E402
from pycoll.torch.tensor_parallel import LayerModule, cross  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402

KEY = Key(7)
H, B, S, STEPS = 8, 3, 4, 4
OPTIONS = {"optimizer": AdamW(lr=0.02, weight_decay=0.3), "clip_norm": 0.5, "bucket_bytes": 400}
JOIN = regions.Region(regions.SPLIT_SEQUENCE.backward, regions.SPLIT_SEQUENCE.forward)

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    """Split layers, layers that all ranks have, and one of PyTorch's own."""

    def __init__(self, comm, sequence_parallel=False):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel
        same = {"sequence_parallel": sequence_parallel, "dtype": "float64"}
        self.norm = LayerModule(LayerNorm(H, KEY.fold("norm"), **same), comm)
        self.up = LayerModule(ColumnParallelLinear(H, 4 * H, KEY.fold("up"), comm, **same))
        down = RowParallelLinear(4 * H, H, KEY.fold("down"), comm, **same)
        self.down = LayerModule(down, comm)
        self.head = torch.nn.Linear(H, 2, dtype=torch.float64)
        for p in self.head.parameters():
            torch.nn.init.constant_(p, 0.25)

    def forward(self, x):
        x = cross(x, regions.SPLIT_SEQUENCE, self.comm) if self.sequence_parallel else x
        x = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return self.head(cross(x, JOIN, self.comm) if self.sequence_parallel else x)


def squares(output, targets):
    return ((output - targets) ** 2).sum(), len(targets)


def batch(step, part):
    rng = np.random.default_rng([step, part])
    return torch.tensor(rng.standard_normal((B, S, H))), torch.tensor(np.ones((B, S, 2)))


def train(comm, dp, tp, zero=0, sequence_parallel=False, start="check", saved=None):
    """Return initial and final parameters, norms, and the state after half of the steps."""
    mesh = Mesh(comm, dp=dp, tp=tp)
    net = Net(mesh.tp, sequence_parallel)
    engine = DataParallel(net, squares, mesh, zero=zero, start=start, **OPTIONS)
    if saved:
        engine.load_state_dict(saved)
    first, norms, state = engine.gather(), [], engine.state_dict()
    parts = range(mesh.dp.rank, 2, dp)
    for step in range(state["steps"], STEPS):
        state = engine.state_dict() if step == STEPS // 2 else state
        norms.append(engine.step([batch(step, part) for part in parts]).grad_norm)
    return first, engine.gather(), norms, state


def close(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("start", ["check", "broadcast"])
@pytest.mark.parametrize(("zero", "sequence_parallel"), [(0, False), (1, True), (2, False)])
def test_a_mesh_trains_as_one_rank_does(zero, sequence_parallel, start):
    """Norm, clipping and decay count every element once; what is gathered is whole."""
    ((first, last, norms, _),) = run_threads(1, train, 1, 1)
    states = []
    for found in run_threads(4, train, 2, 2, zero, sequence_parallel, start):
        close(found[0], first)
        close(found[1], last)
        np.testing.assert_allclose(found[2], norms, rtol=1e-9)
        states.append(found[3])
    ((_, again, _, _),) = run_threads(1, train, 1, 1, 0, False, "check", states[3])
    close(again, last)


def test_weight_decay_is_as_the_layer_says():
    def rank(comm):
        mesh = Mesh(comm, tp=1)
        engine = DataParallel(Net(mesh.tp), squares, mesh, **OPTIONS)
        return {p.name for p in engine.parameters if p.spec.decay}

    expected = {"up.weight", "down.weight", "head.weight", "head.bias"}
    assert run_threads(1, rank) == [expected]


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"dp": 2}, ArgumentError, r"weight is split over tp .* has no tp axis"),
        ({"dp": 2, "tp": 2}, MismatchError, r"weight differs from the mesh: part 0 of 2"),
    ],
)
def test_layers_that_are_split_over_other_ranks(axes, error, text):
    def rank(comm):
        split = comm.split(comm.rank % 2, comm.rank) if len(axes) > 1 else comm
        with pytest.raises(error, match=text):
            DataParallel(Net(split), squares, Mesh(comm, **axes), **OPTIONS)
        return True

    n = int(np.prod(list(axes.values())))
    assert run_threads(n, rank) == [True] * n


@pytest.mark.parametrize("world", [False, True])
def test_a_zero_optimizer_refuses_what_is_split(world):
    """It would clip by another norm on each rank; over all ranks it would copy their parts."""

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        net = Net(mesh.tp)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        with pytest.raises(ArgumentError, match=r"up.weight, up.bias, down.weight are split .*Use"):
            ZeroOptimizer(torch.optim.SGD, net, comm if world else mesh.dp, lr=0.1)
        for module in (net.up, net.down):
            module.requires_grad_(False)
        optimizer = ZeroOptimizer(torch.optim.SGD, net, mesh.dp, lr=0.1)  # what all ranks have
        squares(net(batch(0, mesh.dp.rank)[0]), 1 + batch(0, 0)[1])[0].backward()
        norm = optimizer.step()
        assert mesh.tp.all_gather(np.array([norm])).tolist() == [norm] * 2
        return [torch.equal(p, before[name]) for name, p in net.named_parameters()]

    frozen = {"norm": 2 * [False], "up": 2 * [True], "down": [True, True], "head": 2 * [False]}
    assert run_threads(4, rank) == [[x for part in frozen.values() for x in part]] * 4

"""Parameters and modes without gradients: what is to be trained is never left out silently."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import Mesh  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.data_parallel import DataParallel  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PROTOTYPE = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))  # for all threads


def squares(output, targets):
    return ((output - targets) ** 2).sum(), len(targets)


def batch(rank):
    return [(torch.full((2, 4), 1.0 + rank), torch.ones(2, 2))]


def test_a_parameter_that_was_frozen_is_not_left_out_without_a_word():
    def rank(comm):
        module = copy.deepcopy(PROTOTYPE)
        module[0].weight.requires_grad_(False)
        engine = DataParallel(module, squares, Mesh(comm, dp=-1))
        engine.step(batch(comm.rank))
        module[0].weight.requires_grad_(True)
        with pytest.raises(ArgumentError, match=r"0\.weight, frozen when the engine was"):
            engine.step(batch(comm.rank))

    run_threads(2, rank)


def test_a_replica_on_its_own_says_so_to_nobody_else():
    """Also in its first own step, after one that all have taken together."""

    def rank(comm):
        module, mesh = copy.deepcopy(PROTOTYPE), Mesh(comm, replica=-1)
        module[0].weight.requires_grad_(False)
        engine = DataParallel(module, squares, mesh, sync_every=3, sync_after=1)
        engine.step(batch(comm.rank))
        if comm.rank == 0:
            return engine.step(batch(comm.rank)).samples
        module[0].weight.requires_grad_(True)
        with pytest.raises(ArgumentError, match=r"0\.weight, frozen when the engine was"):
            engine.step(batch(comm.rank))
        return 0

    assert run_threads(2, rank) == [2, 0]


def test_a_step_makes_gradients_where_they_are_turned_off():
    def rank(comm, enabled):
        engine = DataParallel(copy.deepcopy(PROTOTYPE), squares, Mesh(comm, dp=-1))
        with torch.set_grad_enabled(enabled):
            return engine.step(batch(comm.rank)).grad_norm

    assert run_threads(2, rank, False) == run_threads(2, rank, True)


def replaced(module):
    module[1] = torch.nn.Linear(3, 2)


def added(module):
    module[1].register_parameter("scale", torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("change", "names"), [(replaced, r"1\.weight, 1\.bias"), (added, r"1\.scale")]
)
def test_a_parameter_that_comes_later_is_not_left_out_without_a_word(change, names):
    def rank(comm):
        module = copy.deepcopy(PROTOTYPE)
        engine = DataParallel(module, squares, Mesh(comm, dp=-1))
        twin = copy.deepcopy(PROTOTYPE)
        optimizer = ZeroOptimizer(torch.optim.SGD, twin, comm, lr=0.1)
        engine.step(batch(comm.rank))
        if comm.rank:
            change(module)
            change(twin)
        text = f"rank 1 has parameters {names}, added or replaced after the "
        with pytest.raises(ArgumentError, match=f"{text}engine was made"):
            engine.step(batch(comm.rank))
        squares(twin(torch.ones(2, 4)), torch.ones(2, 2))[0].backward()
        with pytest.raises(ArgumentError, match=f"{text}optimizer was made"):
            optimizer.step()

    run_threads(2, rank)

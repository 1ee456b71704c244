"""DDP's buckets in symmetric memory without a line of the program."""

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import pycoll.torch  # noqa: E402
from torch_clients.models import mlp, train  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def registered():
    return len(dist.group.WORLD._caller.session.memory._registered)


def numbers(rank, n, change=None, **options):
    model = DistributedDataParallel(mlp(256), bucket_cap_mb=0.1, **options)
    if change is not None:
        change(model)
    found = train(model, rank) + [p.sum().item() for p in model.parameters()]
    return found, registered()


def test_buckets_are_moved():
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        for _, count in run_group(2, lambda rank, n, o=options: numbers(rank, n, **o)):
            assert count


def test_the_variable_and_the_same_numbers(monkeypatch):
    moved = run_group(2, numbers)
    monkeypatch.setenv("PYCOLL_DDP_SYMMETRIC", "0")
    usual = run_group(2, numbers)
    assert [count for _, count in usual] == [0, 0]
    assert [found for found, _ in moved] == [found for found, _ in usual]


def own_hook(model):
    model.register_comm_hook(model.process_group, allreduce_hook)


def test_hooks_of_the_program_come_first():
    assert all(count == 0 for _, count in run_group(2, numbers, own_hook))
    assert all(count for _, count in run_group(2, numbers, pycoll.torch.use_symmetric_memory))


def test_a_hook_after_the_first_step():
    def body(rank, n):
        model, seen = DistributedDataParallel(mlp(256)), []
        train(model, rank)
        assert registered()
        assert pycoll.torch.use_symmetric_memory(model) is model

        def hook(state: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.append(bucket.index())
            return allreduce_hook(model.process_group, bucket)

        model.register_comm_hook(seen, hook)
        losses = train(model, rank)
        with pytest.raises(RuntimeError, match="only be called once"):
            own_hook(model)
        return losses, bool(seen), registered()

    first, second = run_group(2, body)
    assert first[1:] == second[1:] == (True, 0)


def test_copies_of_a_model():
    def body(rank, n):
        model = DistributedDataParallel(mlp(256))
        train(model, rank)
        other = copy.deepcopy(model)
        return train(other, rank) == train(model, rank), registered() > 0

    assert run_group(2, body) == [(True, True)] * 2


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_have_joined(n, by_all, monkeypatch):
    """They add nothing, and `join` says by what the sum is divided."""

    def body(rank, n):
        model = DistributedDataParallel(mlp(256), bucket_cap_mb=0.1)
        train(model, rank)
        found = []
        with Join([model], divide_by_initial_world_size=by_all):
            for step in range(2 + rank):
                model.zero_grad()
                torch.manual_seed(10 * step + rank)
                model(torch.randn(3, 16)).square().mean().backward()
                found.append([p.grad.sum().item() for p in model.parameters()])
        return found, registered() > 0

    moved = run_group(n, body)
    monkeypatch.setenv("PYCOLL_DDP_SYMMETRIC", "0")
    usual = run_group(n, body)
    for (ours, there), (theirs, nowhere) in zip(moved, usual, strict=True):
        assert (there, nowhere) == (True, False)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # float32; a third is rounded


def test_models_that_are_too_large_stay(monkeypatch):
    monkeypatch.setenv("PYCOLL_HEAP_BYTES", "512K")
    assert all(count == 0 for _, count in run_group(2, numbers))


def test_no_steps_no_buckets():
    def body(rank, n):
        model = DistributedDataParallel(mlp(256))
        for quiet in (torch.no_grad(), model.no_sync(), nullcontext()):
            assert not registered()
            with quiet:
                y = model(torch.ones(2, 16)).sum()
                if y.requires_grad:
                    y.backward()
        return registered() > 0

    assert run_group(2, body) == [True] * 2

"""Futures that C++ reads: TorchScript's interpreter and DDP's built-in hooks are such readers."""

import warnings
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from pycoll.torch import BackendArgumentError, BackendTimeout, Options  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def read(future: torch.jit.Future[list[torch.Tensor]]) -> torch.Tensor:
    return torch.jit.wait(future)[0] + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    first_plus_one = torch.jit.script(read)


def group_for_cpp(n):
    return dist.new_group(range(n), pg_options=Options(cpp_hooks=True))


def test_cpp_reads_the_tensors_of_every_kind_of_call():
    def body(rank, n):
        group, x = group_for_cpp(n), torch.arange(5.0)
        kept = [torch.empty(5) for _ in range(n)]
        works = [
            dist.all_reduce(x.clone(), group=group, async_op=True),
            dist.broadcast(x.clone(), 0, group=group, async_op=True),
            dist.all_gather_into_tensor(torch.empty(n * 5), x, group=group, async_op=True),
            dist.all_gather(kept, x, group=group, async_op=True),
        ]
        sums = [first_plus_one(work.get_future()) for work in works]
        big = torch.ones(300_000)  # is not sent at once
        works = [dist.isend(big, rank ^ 1, group), dist.irecv(big.clone(), rank ^ 1, group)]
        sums += [first_plus_one(work.get_future()) for work in works]
        return [float(total[-1]) for total in sums]

    for found in run_group(2, body):
        assert found == [9, 5, 5, 5, 2, 2]


def test_python_reads_them_as_before_and_chains():
    def body(rank, n):
        work = dist.all_reduce(torch.ones(3), group=group_for_cpp(n), async_op=True)
        chained = work.get_future().then(lambda future: future.value()[0] / n)
        return work.get_future().wait()[0].tolist(), chained.wait().tolist()

    assert run_group(2, body) == [([2.0] * 3, [1.0] * 3)] * 2


def test_a_call_that_has_ended():
    def body(rank, n):
        group, x = group_for_cpp(n), torch.ones(3)
        found = []
        for _ in range(3):  # the first one is not a repeated call
            options = dist.AllreduceOptions()
            options.asyncOp = False
            found.append(float(first_plus_one(group.allreduce([x], options).get_future())[0]))
        return found

    assert run_group(2, body) == [[3.0, 5.0, 9.0]] * 2


def test_errors_reach_cpp_and_keep_their_type_in_python():
    def body(rank, n):
        group = group_for_cpp(n)
        if rank == 0:
            group.set_timeout(timedelta(seconds=0.3))
            future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
            with pytest.raises(BackendTimeout, match=r"^all_reduce on rank 0 of 2 in group"):
                future.wait()
            with pytest.raises(RuntimeError, match="rank 1: has not made this call"):
                first_plus_one(future)
        dist.barrier()

    run_group(2, body)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_a_hook_of_ddp_in_cpp(kind):
    """It takes the gradients out of the future in C++, and fails at an object of Python."""

    def body(rank, n):
        found = []
        for group in (group_for_cpp(n), dist.new_group(range(n), backend="gloo")):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
            model = DistributedDataParallel(model, process_group=group)
            dist._register_builtin_comm_hook(model.reducer, getattr(dist.BuiltinCommHookType, kind))
            for step in range(3):
                model.zero_grad()
                model(torch.full((2, 7), rank + step + 0.1)).sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        return all(map(torch.equal, *found))

    assert run_group(2, body) == [True, True]


def test_what_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr("pycoll.torch.calls.cpp_futures._script", lambda: None)
    with pytest.raises(BackendArgumentError, match="PYTORCH_JIT=0"):
        Options(cpp_hooks=True)
    Options()

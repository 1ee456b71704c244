"""Tensors in symmetric memory: the same results, and memory that is given back."""

import gc
import signal
import time
import weakref
from collections import deque

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import pycoll.torch  # noqa: E402
from pycoll.torch.backend.use_symmetric import Buckets  # noqa: E402
from torch_clients.models import mlp, train  # noqa: E402
from worlds_torch import run_group  # noqa: E402


def gather(out, x):
    dist.group.WORLD._allgather_base(out, x).wait()


def scatter_sums(out, x):
    dist.group.WORLD._reduce_scatter_base(out, x).wait()


@pytest.mark.parametrize("n", [2, 3])
def test_operations(n):
    def body(rank, n):
        group = dist.group.WORLD
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for count in (3, 40_000):
                mine = slice(rank * count, (rank + 1) * count)
                values = torch.arange(n * count) % 5
                want = (values * (n * (n + 1) // 2)).to(dtype)
                whole = group.allocate_tensor(n * count, dtype=dtype)
                block = group.allocate_tensor((count,), dtype=dtype)
                whole.copy_(values * (rank + 1))
                scatter_sums(block, whole)
                assert torch.equal(block, want[mine])
                gather(whole, block)
                assert torch.equal(whole, want)
                whole.zero_()
                whole[mine] = block
                gather(whole, whole[mine])  # in place
                assert torch.equal(whole, want)
                dist.all_reduce(whole, dist.ReduceOp.AVG)
                assert torch.equal(whole, want)
                x = torch.zeros(n * count, dtype=dtype)  # ordinary memory on all ranks
                gather(x, block)
                assert torch.equal(x, want)
        return len(group._caller.calls._direct)

    assert all(run_group(n, body))


def test_registered_tensors():
    def body(rank, n):
        group = dist.group.WORLD
        x = torch.arange(100_001.0)[1:]  # does not begin with a page
        before = x.data_ptr()
        group.register_tensor(x)
        x += rank
        dist.all_reduce(x)
        assert torch.equal(x, 2 * torch.arange(1.0, 100_001) + 1)
        assert x.data_ptr() == before
        assert group._caller.calls._direct
        with pytest.raises(pycoll.torch.BackendArgumentError):
            group.register_tensor(x)
        group.deregister_tensor(x)
        dist.all_reduce(x)
        assert torch.equal(x, 4 * torch.arange(1.0, 100_001) + 2)

    run_group(2, body)


def test_what_a_call_uses_stays_where_it_is():
    """A signal handler has the lock of the call that it interrupted."""

    def body(rank, n):
        group, x, refused = dist.group.WORLD, torch.full((100_000,), rank + 1.0), []
        group.register_tensor(x)

        def deregister(*_):
            with pytest.raises(pycoll.torch.BackendArgumentError, match="in use by a call"):
                group.deregister_tensor(x)
            refused.append(True)
            group.get_group_store().set("refused", "")

        if rank == 0:
            signal.signal(signal.SIGALRM, deregister)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            group.get_group_store().wait(["refused"])
        dist.all_reduce(x)
        assert (x == 3).all()
        group.deregister_tensor(x)
        return refused

    assert run_group(2, body) == [[True], []]


def test_some_ranks_only():
    def body(rank, n):
        group, count = dist.group.WORLD, 100_000
        x = group.allocate_tensor(count, dtype=torch.float32) if rank else torch.empty(count)
        with pytest.raises(dist.DistBackendError, match="MismatchError"):
            dist.all_reduce(x)

    run_group(2, body)


def test_sums_beside_premultiplied_ones():
    """The multiple of a tensor is in symmetric memory, too; a sum has the factor 1."""

    def body(rank, n):
        group, count = dist.group.WORLD, 99_999
        x = group.allocate_tensor(count, dtype=torch.float32).fill_(1)
        y = group.allocate_tensor(count // n, dtype=torch.float32)
        z = torch.ones(count)
        group.register_tensor(z)
        op = dist._make_nccl_premul_sum(2.0) if rank == 1 else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(y, x, op)
        dist.all_reduce(x, op)
        dist.all_reduce(z, op)
        dist.reduce(x, 1, op)
        total = n + 1.0
        wanted = total * total if rank == 1 else total
        found = [bool((t == w).all()) for t, w in ((x, wanted), (y, total), (z, total))]
        group.deregister_tensor(z)
        return found

    assert run_group(3, body) == [[True] * 3] * 3


def ddp(rank, n, symmetric):
    model = DistributedDataParallel(mlp(256), bucket_cap_mb=0.1)
    if symmetric:
        pycoll.torch.use_symmetric_memory(model)
    numbers = train(model, rank) + [p.sum().item() for p in model.parameters()]
    memory, calls = dist.group.WORLD._caller.session.memory, dist.group.WORLD._caller.calls
    registered = len(memory._registered)
    del model
    gc.collect()
    dist.barrier()  # any call moves back what has been collected
    assert not memory._registered
    return numbers, bool(registered), bool(calls._direct)


def fsdp2(rank, n, symmetric):
    model = mlp(256)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this PyTorch allocates FSDP2's buffers itself")
    if symmetric:
        pycoll.torch.use_symmetric_memory(model)
    numbers = train(model, rank) + [p.to_local().sum().item() for p in model.parameters()]
    calls = dist.group.WORLD._caller.calls
    return numbers, calls.symmetric, bool(calls._direct)


@pytest.mark.parametrize("step", [ddp, fsdp2])
def test_training_gives_the_same_numbers(step, monkeypatch):
    monkeypatch.setenv("PYCOLL_DDP_SYMMETRIC", "0")  # only if asked
    for usual, special in zip(run_group(2, step, False), run_group(2, step, True), strict=True):
        assert usual[0] == special[0]
        assert usual[1:] == (False, False)
        assert special[1:] == (True, True)


def test_what_is_refused():
    with pytest.raises(ValueError, match="was not wrapped"):
        pycoll.torch.use_symmetric_memory(mlp())

    def body(rank, n):
        with pytest.raises(ValueError, match="of gloo, not of pycoll"):
            pycoll.torch.use_symmetric_memory(DistributedDataParallel(mlp()))

    run_group(2, body, backend="gloo")


@pytest.mark.parametrize("inside", ["a call", "the queue"])
def test_buckets_that_are_collected_inside_of_a_call(inside):
    """The collector may run anywhere, so it only notes them."""

    def body(rank, n):
        group = dist.group.WORLD
        buckets = Buckets(group)
        for i in range(3):
            buckets.take(i, torch.ones(100_000))
        holder = type("Holder", (), {})()
        holder.me = holder  # a cycle, as a module has
        weakref.finalize(holder, buckets.release).atexit = False
        del holder, buckets
        calls, jobs = group._caller.calls, group._caller.background.jobs
        real = calls.barrier
        if inside == "a call":
            calls.barrier = lambda *args: (gc.collect(), real(*args))
        else:
            group._caller.background.jobs = type("Jobs", (deque,), {"append": collecting})(jobs)
        dist.barrier(async_op=True).wait()
        assert group._caller.session.memory._registered
        dist.barrier()
        assert not group._caller.session.memory._registered

    def collecting(jobs, job):
        gc.collect()
        deque.append(jobs, job)

    run_group(2, body)


def test_a_tensor_is_registered_behind_the_calls_on_it():
    def body(rank, n):
        group, x = dist.group.WORLD, torch.ones(100_000)
        other = torch.ones(100_000)
        group.register_tensor(other)  # symmetric memory is in use
        if rank == 0:
            group._caller.background.submit(lambda: time.sleep(0.3), [])
        work = dist.all_reduce(x, async_op=True)
        if rank == 1:
            time.sleep(0.1)
        group.register_tensor(x)
        work.wait()
        assert (x == n).all()

    run_group(2, body)


def test_a_registered_tensor_that_gets_other_memory():
    def body(rank, n):
        group, big = dist.group.WORLD, 16 << 20  # elements; such memory goes back to the system
        x = torch.zeros(big)
        group.register_tensor(x)
        first, end = x.data_ptr(), x.data_ptr() + x.nbytes
        x.untyped_storage().resize_(0)
        others = [torch.empty(big * 5 // 8) for _ in range(8)]
        inside = [o for o in others if first <= o.data_ptr() and o.data_ptr() + o.nbytes <= end]
        y = (inside or others)[0]
        del others
        y.fill_(rank + 1)
        dist.all_reduce(y)
        assert y[0] == y[big // 2] == n * (n + 1) / 2
        if inside:
            assert not group._caller.session.memory._registered
        group.register_tensor(y)
        group.deregister_tensor(y)
        return bool(inside)

    assert any(run_group(2, body)), "the allocator gave no old address again: nothing was tested"


def test_an_input_inside_the_output():
    def body(rank, n):
        count = 40_000
        x = dist.group.WORLD.allocate_tensor(n * count, dtype=torch.float32)
        x[:count] = rank + 1
        gather(x, x[:count])  # where rank 0 alone has its own block
        assert torch.equal(x, torch.arange(1.0, n + 1).repeat_interleave(count))

    run_group(3, body)


def test_sparse_gradients_stay_where_they_are(monkeypatch):
    monkeypatch.setenv("PYCOLL_DDP_SYMMETRIC", "0")

    def body(rank, n):
        def gradients(wrap):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
            model = wrap(DistributedDataParallel(module))
            for step in range(2):
                model.zero_grad()
                model(torch.tensor([rank, step])).sum().backward()
            return [p.grad.to_dense() for p in model.parameters()]

        ours = gradients(pycoll.torch.use_symmetric_memory)
        assert all(map(torch.allclose, ours, gradients(lambda model: model)))

    run_group(3, body)

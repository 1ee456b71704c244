"""Tensors of a device in a process group of PyTorch, against the same calls on CPU tensors.

Started by ``pycoll run``. Kernels of several processes on one device take turns: no time is taken.
"""

import os
from datetime import timedelta

import numpy as np
from common import open_stage, row_of_all, skip

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    skip(open_stage()[0], str(error))

import pycoll
import pycoll.torch

COUNTS = (1, 5003, 100_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
LIMIT = timedelta(seconds=30)


def join(comm):
    """Make the process group of all ranks; they meet at a store of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None
    port = int(comm.broadcast(np.array([store.port if store else 0]))[0])
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    n = comm.world_size
    dist.init_process_group("pycoll", store=store, rank=comm.rank, world_size=n, timeout=LIMIT)


def values(count, dtype):
    made = torch.Generator().manual_seed(dist.get_rank())
    return (torch.randn(count, generator=made) * 8).to(dtype)


def operations(x):
    """Make every kind of call on a tensor; return what each gives."""
    n, rank = dist.get_world_size(), dist.get_rank()
    like = {"dtype": x.dtype, "device": x.device}
    results = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        results[f"all_reduce {op.name}"] = y = x.clone()
        dist.all_reduce(y, op)
    results["broadcast"] = y = x.clone()
    dist.broadcast(y, 1)
    results["reduce"] = y = x.clone()
    dist.reduce(y, 0)
    whole = results["all_gather_into_tensor"] = torch.empty(n * x.numel(), **like)
    dist.all_gather_into_tensor(whole, x)
    results["reduce_scatter_tensor"] = y = torch.empty_like(x)
    dist.reduce_scatter_tensor(y, whole)
    results["all_to_all_single"] = y = torch.empty_like(whole)
    dist.all_to_all_single(y, whole * (rank + 1))
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    results["all_gather"] = torch.cat(parts)
    ragged = [torch.empty(k + 1, **like) for k in range(n)]
    dist.all_gather(ragged, x[:1].expand(rank + 1).contiguous())
    results["all_gather of different sizes"] = torch.cat(ragged)
    results["send and recv"] = y = torch.empty_like(x)
    around = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    return results


def streams(device):
    """Call in the background between kernels that take long, on several streams."""
    n, size = dist.get_world_size(), 2048
    good, works, sums = True, [], []
    for step in range(8):
        x = torch.eye(size, device=device)
        for _ in range(4):
            x = x @ torch.eye(size, device=device)  # still to be done when the call is made
        x += dist.get_rank() + step
        works.append(dist.all_reduce(x, async_op=True))
        sums.append(x)
    for step, (work, x) in enumerate(zip(works, sums, strict=True)):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            work.wait()
            want = n * torch.eye(size, device=device) + sum(range(n)) + n * step
            good = good and bool(torch.equal(x, want))
    future = dist.all_reduce(torch.ones(4, device=device), async_op=True).get_future()
    doubled = future.then(lambda f: 2 * f.value()[0]).wait()
    return good and doubled.tolist() == [2.0 * n] * 4


def training(device):
    """Return the parameters after a few steps of DDP."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    ddp = DistributedDataParallel(model.to(device), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.sin(torch.arange(32.0 * 16) + 7 * step + dist.get_rank()).view(16, 32)
        ddp(x.to(device)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().cpu().view(-1) for p in ddp.parameters()])


def check(device, row):
    """Compare everything with the CPU; `row` takes what was compared, and whether it is right."""
    for dtype in DTYPES:
        for count in COUNTS:
            x = values(count, dtype)
            want, got = operations(x), operations(x.to(device))
            for name, y in want.items():
                row(name, torch.equal(got[name].cpu(), y), count=count, dtype=str(dtype)[6:])
    dist.barrier()
    difference = (training(device) - training("cpu")).abs().max().item()
    row("DDP", difference < 1e-5, difference=difference)


def main():
    writer, _ = open_stage()
    if not torch.version.cuda or not torch.cuda.is_available():
        skip(writer, f"PyTorch {torch.__version__} has no CUDA")
    torch.cuda.set_device(int(os.environ.get("PYCOLL_GPU_DEVICE", "0")))
    with pycoll.init(timeout=30) as comm:

        def row(name, good, **facts):
            row_of_all(comm, writer, "torch", good, operation=name, **facts)

        join(comm)
        check("cuda", row)
        row("streams", streams("cuda"))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What ranks on several hosts run: ``torchrun torch_hosts_program.py``, or by an MPI launcher.

Every rank prints one line when it has succeeded.
"""

import contextlib
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from worlds_torch import take_host

SIZES = (0, 1, 13, 5000, 70_000)


def every_operation(rank, n):
    """Try every operation of c10d with sizes that take different ways."""
    for count in SIZES:
        reductions(rank, n, count)
        moves(rank, n, count)
    messages(rank, n)
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(n))
    with contextlib.suppress(dist.DistBackendError):  # on every rank, and nothing is broken
        dist.all_reduce(torch.ones(3).to_sparse())
    dist.barrier()
    return True


def reductions(rank, n, count):
    total = n * (n + 1) // 2
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        whole = torch.arange(n * count) % 7
        x = (whole[:count] * (rank + 1)).to(dtype)
        dist.all_reduce(x)
        assert torch.equal(x, (whole[:count] * total).to(dtype))
        x = (whole * (rank + 1)).to(dtype)
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, x)
        assert torch.equal(out, (whole * total).to(dtype)[rank * count : (rank + 1) * count])
        dist.reduce(x, n - 1, dist.ReduceOp.MAX)
        assert rank != n - 1 or torch.equal(x, (whole * n).to(dtype))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.BAND)
    assert flags.tolist() == [n == 1, True, False]
    x = torch.full((count,), float(rank))
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert (x == (n - 1) / 2).all()


def moves(rank, n, count):
    blocks = [torch.arange(count) + 1000 * r for r in range(n)]
    whole, mine = torch.cat(blocks), blocks[rank]
    for root in range(n):
        x = mine.clone()
        dist.broadcast(x, root)
        assert torch.equal(x, blocks[root])
    out = torch.empty_like(whole)
    dist.all_gather_into_tensor(out, mine)
    assert torch.equal(out, whole)
    uneven = [torch.empty(r + count, dtype=torch.int16) for r in range(n)]
    dist.all_gather(uneven, torch.full((rank + count,), rank, dtype=torch.int16))
    assert all((part == r).all() for r, part in enumerate(uneven))
    parts = [torch.empty_like(mine) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, parts, 0)
    assert rank != 0 or torch.equal(torch.cat(parts), whole)
    x = torch.empty_like(mine)
    dist.scatter(x, blocks if rank == n - 1 else None, n - 1)
    assert torch.equal(x, mine)
    out = torch.empty_like(whole)
    dist.all_to_all_single(out, torch.cat([mine + 7 * r for r in range(n)]))
    assert torch.equal(out, whole + 7 * rank)
    sizes = [[(r + 2 * q) % 4 for q in range(n)] for r in range(n)]  # some are 0
    receive = [sizes[r][rank] for r in range(n)]
    out = torch.empty(sum(receive))
    given = torch.cat([torch.full((k,), float(rank)) for k in sizes[rank]])
    dist.all_to_all_single(out, given, receive, sizes[rank])
    want = torch.cat([torch.full((k,), float(r)) for r, k in enumerate(receive)])
    assert torch.equal(out, want)


def messages(rank, n):
    for count in (0, 3, 1 << 20):
        left, right = (rank - 1) % n, (rank + 1) % n
        x, out = torch.full((count,), float(rank)), torch.empty(count)
        calls = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert (out == left).all()
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            x = torch.empty(2)
            seen.add(dist.recv(x, tag=5))
        assert seen == set(range(1, n))
    else:
        dist.send(torch.ones(2), 0, tag=5)
    if rank == 0:
        pair = [torch.empty(1) for _ in range(2)]
        works = [dist.irecv(x, n - 1, tag=9) for x in pair]
        works[1].wait()
        works[0].wait()
        assert [x.item() for x in pair] == [1, 2]  # in the order in which they were sent
    if rank == n - 1:
        for value in (1.0, 2.0):
            dist.send(torch.full((1,), value), 0, tag=9)


def main():
    import pycoll.torch  # noqa: F401 - registers the backend

    for name, variables in {
        "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    }.items():
        for variable in variables:
            if variable in os.environ:
                os.environ.setdefault(name, os.environ[variable])
    torch.set_num_threads(1)
    if sys.argv[1:]:  # the host of each rank, to be believed
        take_host(int(sys.argv[1:][int(os.environ["RANK"])]))
    dist.init_process_group("pycoll", timeout=timedelta(seconds=60))
    every_operation(dist.get_rank(), dist.get_world_size())
    transport = dist.group.WORLD._caller.session.transport
    sys.stdout.write(f"rank {dist.get_rank()} on {socket.gethostname()}: {transport}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

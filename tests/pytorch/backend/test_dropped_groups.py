"""What groups keep that nobody destroys, and what changes their time limit."""

import gc
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
from pycoll.torch.backend import bootstrap  # noqa: E402
from worlds_torch import run_group  # noqa: E402

GROUPS = 50


def kept():
    """Return descriptors, threads and address space in GiB of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    vm = int(re.search(r"VmSize:\s+(\d+)", status)[1]) >> 20
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), vm


def test_groups_share_a_thread_and_the_heap_of_all_ranks():
    def body(rank, n):
        before = kept()
        for _ in range(GROUPS):
            group = dist.new_group(range(n))
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert (x == n).all()
        return [b - a for a, b in zip(before, kept(), strict=True)]

    for fds, threads, gib in run_group(2, body):
        assert fds <= GROUPS + 2  # the control memory of each
        assert threads <= 1  # one shows the peers of all groups that this process lives
        assert gib <= 8  # each would map 32 or so


def test_symmetric_tensors_of_groups_that_share_a_heap():
    def body(rank, n):
        pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 2], [2, 1, 0])]
        for group in pairs:
            if dist.get_rank(group) < 0:
                continue
            own = [group.allocate_tensor(50_000, dtype=torch.float32) for _ in range(3)]
            for i, x in enumerate(own):
                x.fill_(rank + i)
            for i, x in enumerate(own):
                dist.all_reduce(x, group=group)
                want = sum(r + i for r in dist.get_process_group_ranks(group))
                assert (x == want).all()
        own = [g for g in (dist.group.WORLD, *pairs) if dist.get_rank(g) >= 0]
        return len({g._caller.session.memory for g in own})

    assert run_group(3, body) == [1, 1, 1]


def test_a_child_does_not_use_the_heap_of_its_parent(tmp_path):
    """A child made by fork has the parent's groups in its memory."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("pycoll", store=store, rank=0, world_size=1)
    try:
        assert len(bootstrap._heaps_here()) == 1
        child = os.fork()
        if child == 0:
            os._exit(len(bootstrap._heaps_here()))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert bootstrap._heaps_here() == {}


def test_set_pg_timeout():
    def body(rank, n):
        other = dist.new_group(range(n))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), other)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=20))
        assert dist.group.WORLD._caller.timeout_s == 20
        if rank == 0:
            with pytest.raises(pycoll.torch.BackendTimeout, match="rank 1: has not made this call"):
                dist.all_reduce(torch.ones(1), group=other)
        dist.barrier()

    run_group(2, body)


def test_set_pg_timeout_of_gloo():
    def body(rank, n):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert run_group(1, body, backend="gloo") == [7.0]

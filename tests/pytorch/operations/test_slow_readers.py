"""Process groups on several hosts of which a rank reads late what others send."""

import os
import signal
import subprocess

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import worlds_torch  # noqa: E402
from cases import shared_float  # noqa: E402
from worlds_torch import run_group  # noqa: E402

pytestmark = pytest.mark.usefixtures("apart")


@pytest.fixture
def apart(monkeypatch):
    """Make two ranks take themselves to be on two hosts."""
    monkeypatch.setattr(worlds_torch, "HOSTS", (0, 1))


def test_a_rank_that_leaves():
    """What it has sent gets there, though its peer stands still for longer than an end takes."""
    rows, pid = torch.arange(3000.0)[:, None].expand(-1, 2000), shared_float()

    def body(rank, n):
        if rank == 1:
            pid[0] = os.getpid()
        dist.barrier()
        if rank == 1:
            for row in rows:
                got = torch.empty(2000)
                dist.recv(got, 0)
                assert torch.equal(got, row)
            return
        os.kill(int(pid[0]), signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {int(pid[0])}"])
        for row in rows:
            dist.send(row.contiguous(), 1)

    run_group(2, body)

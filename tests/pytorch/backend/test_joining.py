"""Ranks that die before a group is made, and those that come after them."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402
from faults import BOUND_S, Event  # noqa: E402
from pycoll.testing import run_processes  # noqa: E402
from pycoll.torch.backend import bootstrap  # noqa: E402
from worlds_torch import run_group  # noqa: E402

PROGRAM = """
import os, signal, time, torch, torch.distributed as dist, pycoll.torch
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("pycoll")
x = torch.ones(3)
dist.all_reduce(x)
if attempt < 2 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(f"attempt {attempt}: {x.tolist()}")
"""


@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2]])
def test_a_killed_rank_does_not_come_to_a_new_group(members):
    event = Event()

    def body(rank, n):
        dist.all_reduce(torch.ones(100))
        if rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank not in members:
            return ""
        with pytest.raises(dist.DistBackendError) as told:
            dist.new_group(members)
        assert event.age() < BOUND_S
        return str(told.value)

    place = members.index(1)
    first, _, third = run_group(3, body, may_die=[1])
    for text in (first, third)[0 not in members :]:
        assert re.search(rf"rank {place} \(process \d+\) died while it joined", text), text


@pytest.mark.parametrize("late_s", [0, 0.3])
def test_a_rank_that_dies_while_it_joins(tmp_path, monkeypatch, late_s):
    """Also where rank 0, whose memory the late one is to open, has given up before."""
    event, opened = Event(), bootstrap._open

    def body(rank, n):
        dist.destroy_process_group()

        def open_late(*given):
            if rank == 1:
                event.happens()
                os._exit(3)
            time.sleep(late_s * (rank == 2))
            return opened(*given)

        monkeypatch.setattr(bootstrap, "_open", open_late)
        store = dist.FileStore(str(tmp_path / "store"), n)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 \(process \d+\) died"):
            dist.init_process_group("pycoll", store=store, rank=rank, world_size=n)
        assert event.age() < BOUND_S

    assert run_group(3, body, may_die=[1]) == [None, 3, None]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_cannot_join(tmp_path, monkeypatch, late):
    """The others hear why, whoever came first; who comes to the store later does not."""

    def body(rank, n):
        dist.destroy_process_group()
        texts = []
        for name in ("much", "16G"):
            if rank == 1:
                monkeypatch.setenv("PYCOLL_HEAP_BYTES", name)
            time.sleep(0.2 * (rank == late))
            store = dist.FileStore(str(tmp_path / "store"), n)
            start = time.monotonic()
            try:
                dist.init_process_group("pycoll", store=store, rank=rank, world_size=n)
                dist.destroy_process_group()
            except dist.DistBackendError as error:
                texts.append(str(error))
            assert time.monotonic() - start < 0.2 + BOUND_S
        return texts

    for rank, [text] in enumerate(run_group(3, body)):
        assert "PYCOLL_HEAP_BYTES='much'" in text
        assert rank == 1 or "rank 1 cannot join: ArgumentError: " in text


def test_ranks_that_torchrun_starts_again(tmp_path):
    """They meet at the store that dead ones have left their cards in."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=3", "--monitor-interval=0.1", str(program)]
    root = str(Path(pycoll.__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout.count("attempt 2: [2.0, 2.0, 2.0]") == 2, done.stderr


def test_a_store_that_is_used_again(tmp_path):
    """By other processes, in another order, and by groups that follow each other in one."""

    def rank(comm, turn):
        sums = []
        for _ in range(3):
            store = dist.FileStore(str(tmp_path / "store"), 3)
            number = (comm.rank + turn) % 3
            time.sleep(0.05 * number)  # the last one finds what others have left of before
            dist.init_process_group(*("pycoll", None, timedelta(seconds=8), 3, number), store=store)
            x = torch.ones(2) + number
            dist.all_reduce(x)
            sums += x.tolist()
            comm.barrier()
            os._exit(0) if turn == 0 else dist.destroy_process_group()
        return sums

    keep = dist.FileStore(str(tmp_path / "store"), 3)
    run_processes(3, rank, 0, may_die=range(3))
    assert run_processes(3, rank, 1) == [[6.0] * 6] * 3
    assert run_processes(3, rank, 2) == [[6.0] * 6] * 3
    del keep

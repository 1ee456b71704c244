"""Ranks that die before a group is made."""

import os
import re
import signal
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import pycoll.torch  # noqa: E402, F401
from faults import BOUND_S, Event  # noqa: E402
from worlds_torch import run_group  # noqa: E402


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

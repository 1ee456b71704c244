"""What waiting leaves behind."""

import os
import time

import numpy as np
import pytest

from pycoll.testing import run_processes


@pytest.mark.parametrize("policy", [os.SCHED_OTHER, os.SCHED_BATCH])
def test_waiting_changes_neither_policy_nor_niceness(policy):
    def rank(comm):
        os.nice(3 + comm.rank)
        os.sched_setscheduler(0, policy, os.sched_param(0))
        x = np.ones(10)
        for _ in range(3):
            if comm.rank == 0:
                time.sleep(0.02)  # the other one comes to sleep
            comm.all_reduce(x, out=x)
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), float(x[0])

    assert run_processes(2, rank) == [(policy, 3, 8.0), (policy, 4, 8.0)]

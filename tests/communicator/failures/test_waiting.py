"""What waiting leaves behind, and what counts as waiting."""

import os
import subprocess
import threading
import time

import numpy as np
import pytest

import chaos
from pycoll import CollTimeout
from pycoll.config import Config
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


def be_suspended(pids):
    """Stop these processes, this one among them, for 4 s, and return 0.3 s after that."""
    names, now, gap = " ".join(map(str, pids)), time.monotonic(), 0.0
    with subprocess.Popen(["sh", "-c", f"kill -STOP {names}; sleep 4; kill -CONT {names}"]):
        while gap < 2:
            time.sleep(0.01)
            before, now = now, time.monotonic()
            gap = now - before
        time.sleep(0.3)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["all_reduce", "recv", "wait"])
def test_a_job_that_is_suspended_goes_on(call, transport):
    """Rank 1 waits for less than its time limit, if the time in which both are stopped is none."""

    def body(comm):
        x = np.ones(1)
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 0:
            be_suspended(pids)
        if call == "recv":
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0, timeout=3)
        elif call == "wait":
            comm.all_reduce(x, out=x, timeout=3, async_op=True).wait(timeout=3)
        else:
            comm.all_reduce(x, out=x, timeout=3)
        return float(x[0])

    def rank(comm):
        if transport == "shm":
            return body(comm)
        with chaos.over_tcp(comm, [0, 1], Config(3.0)) as connected:
            return body(connected)

    assert run_processes(2, rank) == [1.0 if call == "recv" else 2.0] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_waiting_for_the_lock_of_python_counts(transport):
    """A thread of the program that keeps the lock does not stretch the time limit."""

    def body(comm):
        over = threading.Event()

        def keep_the_lock():
            while not over.is_set():
                sum(range(10**8))  # some seconds

        thread = threading.Thread(target=keep_the_lock)
        if comm.rank == 0:
            thread.start()
            with pytest.raises(CollTimeout):
                comm.recv(np.ones(1), 1, timeout=2)
            over.set()
            thread.join()
        comm.barrier(timeout=60)

    def rank(comm):
        if transport == "shm":
            return body(comm)
        with chaos.over_tcp(comm, [0, 1], Config(60.0)) as connected:
            return body(connected)

    run_processes(2, rank, timeout=60)

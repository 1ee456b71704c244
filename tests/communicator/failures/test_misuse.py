"""Use after close, in a forked child, from two threads, inside a signal handler."""

import copy
import dataclasses
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import pycoll
from pycoll.algorithms import find
from pycoll.errors import (
    CommClosed,
    ConcurrentUseError,
    ForkedError,
    PeerLeft,
    Revoked,
)
from pycoll.testing import run_processes

X = np.ones(10)

USES = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "in the background": lambda comm: comm.all_reduce(X, async_op=True),
    "broadcast": lambda comm: comm.broadcast(X),
    "barrier": lambda comm: comm.barrier(),
    "v-variant": lambda comm: comm.all_gather_v(X),
    "send": lambda comm: comm.send(X, 1),
    "recv": lambda comm: comm.recv(np.empty(10), 1),
    "split": lambda comm: comm.split(0),
    "dup": lambda comm: comm.dup(),
    "abort": lambda comm: comm.abort(),
    "bad argument": lambda comm: comm.all_reduce(X, "mean"),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close(run, use):
    def rank(comm):
        comm.all_reduce(X)
        plan = comm.plan("all_reduce", X)
        comm.close()
        comm.close()
        with pytest.raises(CommClosed):
            USES[use](comm)
        with pytest.raises(CommClosed):
            plan(X)
        return comm.rank, comm.world_size, repr(comm)

    assert run(2, rank) == [(r, 2, f"<pycoll.Communicator rank {r} of 2>") for r in range(2)]


def test_symmetric_arrays_outlive_the_communicator(run):
    def rank(comm):
        x = comm.empty(1000)
        x[:] = 5
        comm.barrier()
        comm.close()
        del comm
        gc.collect()
        return float(x.sum())

    assert run(2, rank) == [5000.0] * 2


def mappings():
    """Count the mappings of shared memory that this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:pycoll-control")


def test_close_frees_the_memory():
    def rank(comm):
        before = mappings()
        twins = [comm.dup() for _ in range(3)]
        during = mappings()
        for twin in twins:
            twin.all_reduce(X)
            twin.close()
        return during - before, mappings() - before, len(twins)

    assert run_processes(2, rank) == [(3, 0, 3)] * 2


def test_dropping_a_communicator_closes_it():
    def rank(comm):
        for _ in range(20):
            comm.dup().all_reduce(X)
            gc.collect()
        return mappings(), len(os.listdir("/proc/self/task"))

    assert all(maps <= 2 and threads <= 4 for maps, threads in run_processes(2, rank))


def test_a_communicator_that_its_own_algorithm_refers_to():
    """Once nobody else does, both go: the calls it remembers keep the algorithm."""

    def rank(comm):
        twin, ring = comm.dup(), find("all_reduce", "ring")

        def rounds(rank, n, held=twin):
            yield from ring.rounds(rank, n)

        own = dataclasses.replace(ring, name="own", rounds=rounds)
        for _ in range(3):
            twin.all_reduce(X, algorithm=own)
        seen = weakref.ref(twin)
        del rounds, own, twin
        gc.collect()
        return seen() is None

    assert run_processes(2, rank) == [True, True]


def in_child(function):
    """Run a function in a forked child; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_is_refused(use):
    def rank(comm):
        x = comm.empty(3000)
        x[:] = 1

        def child():
            with pytest.raises(ForkedError, match="fork"):
                USES[use](comm)
            comm.close()

        codes = [in_child(child) for _ in range(2)]
        return codes, float(comm.all_reduce(x)[-1]), float(x.sum())

    assert run_processes(2, rank) == [([0, 0], 2.0, 3000.0)] * 2


def test_a_forked_child_that_drops_everything_disturbs_nobody():
    def rank(comm):
        keep = {"comm": comm, "x": comm.empty(100_000), "twin": comm.dup()}
        keep["x"][:] = 7
        work = comm.all_reduce(X, async_op=True)

        def child():
            nonlocal comm, work
            comm = work = None
            keep.clear()
            gc.collect()

        code = in_child(child)
        comm.barrier()
        total = keep["twin"].all_reduce(keep["x"])
        return code, float(keep["x"].min()), float(total.min()), float(work.wait()[0])

    assert run_processes(2, rank) == [(0, 7.0, 14.0, 2.0)] * 2


def test_a_forked_child_may_end_while_the_parent_waits():
    def rank(comm):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.1)
            os._exit(0)
        if comm.rank == 1:
            time.sleep(0.4)
        total = comm.all_reduce(X)
        os.waitpid(pid, 0)
        return float(total[0])

    assert run_processes(2, rank) == [2.0, 2.0]


def test_two_threads_at_once():
    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.4)
            return float(comm.all_reduce(X)[0])
        results = []
        waiting = threading.Thread(target=lambda: results.append(comm.all_reduce(X)))
        waiting.start()
        time.sleep(0.1)
        with pytest.raises(ConcurrentUseError, match=r"(?i)thread"):
            comm.all_reduce(X)
        waiting.join()
        return float(results[0][0])

    assert run_processes(2, rank) == [2.0, 2.0]


def test_two_threads_in_turn(run):
    def rank(comm):
        results = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: results.append(comm.all_reduce(X)[0]))
            thread.start()
            thread.join()
            results.append(comm.all_reduce(X)[0])
        return float(sum(results))

    assert run(2, rank) == [12.0, 12.0]


@pytest.mark.parametrize("background", [False, True])
def test_a_call_inside_of_a_signal_handler(background):
    def rank(comm):
        seen = []

        def handler(*_):
            with pytest.raises(ConcurrentUseError):
                comm.barrier()
            with pytest.raises(ConcurrentUseError):
                comm.barrier(async_op=True)
            seen.append(1)

        signal.signal(signal.SIGUSR2, handler)
        if comm.rank == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        else:
            time.sleep(0.4)
        total = comm.all_reduce(X, async_op=background)
        return float((total.wait() if background else total)[0]), len(seen)

    assert run_processes(2, rank) == [(2.0, 1), (2.0, 0)]


def test_an_exception_of_a_signal_handler_comes_out_of_the_call():
    def rank(comm):
        def handler(*_):
            raise LookupError("from the handler")

        signal.signal(signal.SIGUSR2, handler)
        if comm.rank == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            with pytest.raises(LookupError, match="from the handler"):
                comm.recv(np.empty(1), 1)
            return True
        with pytest.raises(Revoked):
            comm.barrier()
        return True

    assert run_processes(2, rank) == [True, True]


def test_a_context_manager_tells_peers_of_the_exception(run):
    def rank(comm):
        twin = comm.dup()
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError), twin:
                raise ZeroDivisionError("division by zero")
        else:
            with pytest.raises(PeerLeft, match="ZeroDivisionError: division by zero"):
                twin.barrier()
        return float(comm.all_reduce(X)[0])

    assert run(2, rank) == [2.0, 2.0]


def test_a_communicator_is_neither_copied_nor_pickled():
    with pycoll.init() as comm:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="dup"):
                attempt(comm)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"shape": (1,) * 70}, "70 dimensions"),
        ({"shape": 3, "device": "tpu"}, "accepted: cpu, cuda"),
    ],
)
def test_symmetric_memory_that_cannot_be(arguments, told):
    with pycoll.init() as comm, pytest.raises(pycoll.ArgumentError, match=told):
        comm.empty(**arguments)

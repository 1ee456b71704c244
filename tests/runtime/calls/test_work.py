"""How a call in the background has ended, for whoever asks, however often."""

import contextlib
import copy
import pickle
import threading
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, CollTimeout, PeerRejected, Revoked
from pycoll.testing import run_processes


def test_an_error_is_raised_in_every_thread_that_waits():
    def rank(comm):
        seen = []

        def wait(work):
            try:
                seen.append(work.wait())
            except PeerRejected:
                seen.append("rejected")

        for _ in range(50):
            if comm.rank == 0:
                work = comm.all_reduce(np.ones(10), async_op=True)
                threads = [threading.Thread(target=wait, args=(work,)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                time.sleep(0.005)
                with pytest.raises(ArgumentError):
                    comm.all_reduce(np.ones(10), "nonsense")
            comm.barrier()
        return seen

    assert run_processes(2, rank) == [["rejected"] * 100, []]


def polled(work, step):
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(CollTimeout):
            return work.wait(timeout=step)
    raise AssertionError("it still runs")


@pytest.mark.parametrize("step", [0, 1e-4])
def test_polling_ends_with_the_error_of_the_call(step):
    """Between the failure and the end of the call, a wait may still be too short."""

    def rank(comm):
        for k in range(20):
            part = comm.dup()
            part.barrier()
            if comm.rank == 1:
                time.sleep(0.01 + k * 1e-4)
                part.abort("enough")
                part.close()
                continue
            work = part.all_reduce(np.ones(10), async_op=True)
            with pytest.raises(Revoked, match="enough"):
                polled(work, step)
            assert work.done()
            with pytest.raises(Revoked, match="enough"):
                work.wait()
            part.close()
        return True

    assert run_processes(2, rank) == [True, True]


def test_a_work_says_how_to_get_at_the_result(run):
    def rank(comm):
        works = [comm.all_reduce(np.ones(3), async_op=True), comm.isend(np.ones(3), comm.rank)]
        comm.recv(np.ones(3), comm.rank)
        told = {repr(work) for work in works}
        return told, [work.wait() is None for work in works]

    assert run(1, rank) == [({"<pycoll.Work: wait() returns what the call gives>"}, [False, True])]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_a_work_nor_a_plan_can_be_copied(run, way):
    def rank(comm):
        work = comm.all_reduce(np.ones(3), async_op=True)
        for what in (work, comm.plan("all_reduce", like=np.ones(3))):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                way(what)
        return work.wait()[0]

    assert run(1, rank) == [1.0]


@pytest.mark.parametrize(
    "call",
    {
        "wait": lambda comm, limit: comm.all_reduce(np.ones(3), async_op=True).wait(limit),
        "recv": lambda comm, limit: comm.recv(np.ones(3), timeout=limit),
        "check": lambda comm, limit: comm.check(timeout=limit),
        "shrink": lambda comm, limit: comm.shrink(timeout=limit),
    }.values(),
)
def test_a_text_is_no_time_even_if_it_spells_a_number(run, call):
    def rank(comm):
        for wrong in ("3", True):
            with pytest.raises(ArgumentError, match=f"timeout={wrong!r}; accepted is a number of"):
                call(comm, wrong)
        return comm.all_reduce(np.ones(1))[0]

    assert run(1, rank) == [1.0]

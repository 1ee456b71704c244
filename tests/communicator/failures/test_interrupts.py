"""Ranks that are stopped, slow, interrupted or aborted."""

import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from faults import BOUND_S, WAITS, Event, InterruptAt, X, expect, state_of
from pycoll.config import Config
from pycoll.errors import CollTimeout, PeerLeft, Revoked
from pycoll.testing import run_processes, run_threads
from samples import sample


def test_a_stopped_rank():
    heard = Event()

    def rank(comm):
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(CollTimeout) as caught:
                comm.all_reduce(X)
            return str(caught.value)
        while state_of(pids[1]) != "T":
            time.sleep(0.001)
        start = time.monotonic()
        with pytest.raises(CollTimeout) as caught:
            comm.all_reduce(X, timeout=0.5)
        elapsed, text = time.monotonic() - start, str(caught.value)
        assert elapsed < 0.5 + BOUND_S
        assert elapsed >= 0.5 or f"rank {comm.rank} gave up" not in text
        if comm.rank == 2:
            heard.happens()
        else:
            heard.wait()
            os.kill(int(pids[1]), signal.SIGCONT)
        return text

    texts = run_processes(3, rank)
    for text in texts:
        assert re.search(r"rank [02] gave up after waiting [\d.]+ s", text)
        assert "waits for rank 1 to make this call" in text
        assert "rank 1: has not made this call; last call: all_gather(into int64[" in text
        assert "is stopped by a signal" in text
    assert len(set(texts)) == 1


def test_a_pause_is_no_death():
    def rank(comm):
        pid = int(comm.broadcast(np.array([os.getpid()]), root=1)[0])
        if comm.rank == 0:
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        if comm.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        return float(comm.all_reduce(np.ones(1))[0])

    assert run_processes(3, rank) == [3.0] * 3


def test_a_chain_of_waiting_ranks_names_its_end():
    """Rank 2 waits for 1 and 1 for 0, which is busy with something else."""

    def rank(comm):
        comm.barrier()
        if comm.rank == 0:
            time.sleep(1)
        elif comm.rank == 1:
            with pytest.raises(CollTimeout) as caught:
                comm.recv(np.empty(1), 0, timeout=5)
            return str(caught.value)
        else:
            with pytest.raises(CollTimeout) as caught:
                comm.all_reduce(X, timeout=0.3)
            return str(caught.value)
        return ""

    text = run_processes(3, rank)[2]
    assert "rank 2: is in all_reduce(" in text
    assert "rank 0: has not made this call; last call: barrier(" in text


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c(wait):
    event = Event()

    def rank(comm):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pids = comm.all_gather(np.array([os.getpid()]))
        if comm.rank == 1:
            time.sleep(0.2)
            event.happens()
            os.kill(int(pids[0]), signal.SIGINT)
            time.sleep(0.2)
        if comm.rank:
            name, text = expect(comm, Revoked, WAITS[wait], event, "interrupt")
            assert "rank 0 was interrupted (process " in text
            assert re.search(r"\); its last call was \w+\(.* at \w+\.py:\d+ ", text)
            assert "descriptor" not in text
            return name
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](comm)
        assert event.age() < BOUND_S
        with pytest.raises(Revoked):
            comm.barrier()
        return "KeyboardInterrupt"

    results = run_processes(3, rank)
    assert results == ["KeyboardInterrupt", "Revoked", "Revoked"]


def test_a_signal_whose_handler_returns_disturbs_nobody():
    def rank(comm):
        seen = []
        signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
        if comm.rank == 0:
            for delay in (0.05, 0.1, 0.15):
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        else:
            time.sleep(0.4)
        return float(comm.all_reduce(np.ones(1))[0]), len(seen)

    assert run_processes(2, rank) == [(2.0, 3), (2.0, 0)]


def test_abort_from_another_thread():
    event = Event()

    def rank(comm):
        if comm.rank == 0:

            def stop():
                event.happens()
                comm.abort("the user pressed stop")

            threading.Timer(0.2, stop).start()
        if comm.rank == 1:
            time.sleep(0.4)
        name, text = expect(comm, Revoked, WAITS["barrier"], event, "the user pressed stop")
        assert "rank 0 aborted the communicator (the user pressed stop) (process " in text
        assert "descriptor" not in text
        return name

    assert run_threads(3, rank) == ["Revoked"] * 3
    assert run_processes(3, rank) == ["Revoked"] * 3


def all_reduce(comm, given, **options):
    return comm.all_reduce(np.full(5000, given), **options)


def v_variant(comm, given):
    both = comm.all_gather_v(np.full(int(given) % 7 + 1, given))
    return both[:1] + both[-1:]


def in_a_group(comm, given):
    with comm.split(0) as group:
        return group.all_reduce(np.full(9, given))


PLAN = {}
# How a call is made, what comes before it, and the first point at which pycoll can tell the peers.
POINTS = {
    "blocking": (all_reduce, None, 0),
    "in the background": (lambda *given: all_reduce(*given, async_op=True).wait(), None, 0),
    "remembered": (all_reduce, lambda comm: comm.all_reduce(np.ones(5000)), 0),
    "v-variant": (v_variant, None, 1),
    "split": (in_a_group, None, 1),
    "plan": (
        lambda _, given: PLAN["it"](np.full(5000, given)),
        lambda comm: PLAN.update(it=comm.plan("all_reduce", np.ones(5000))),
        1,
    ),
}


@pytest.mark.parametrize("way", POINTS)
def test_an_interrupt_at_any_point_of_a_call(way):
    """Nobody gets the result of another call: the next one raises, or nothing has happened."""
    make, before, number = POINTS[way]
    step = sample(1, 3)

    def outcome(comm, given):
        try:
            return float(make(comm, given)[0])
        except (Revoked, PeerLeft):
            return -1.0

    def rank(comm):
        nonlocal number
        where, given = True, 10.0**comm.rank  # the sum of any two calls tells which they are
        while where:
            part = comm.dup()
            if before:
                before(part)
            comm.barrier()
            interrupt = InterruptAt(None if comm.rank else number)
            first = interrupt.run(outcome, part, given)
            second = outcome(part, 2 * given)
            part.close()
            where = bool(comm.broadcast(np.array([interrupt.where is not None]))[0])
            assert first in {None, 11.0, -1.0}, (first, second, interrupt.where)
            assert second in {22.0, -1.0}, (first, second, interrupt.where)
            number += step
        return number

    assert run_processes(2, rank, timeout=60, config=Config(timeout_s=10))[0] > 20

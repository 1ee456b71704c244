"""Plans for which there is no memory are refused before they are compiled."""

import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from pycoll.algorithms import ALGORITHMS, find
from pycoll.runtime.calls import plan_room
from pycoll.runtime.calls.plan_room import PlanRoom, compile_bytes
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.testing import run_threads


def test_the_estimate_is_what_compiling_takes():
    """It takes no more than that, by much."""
    for algorithm in (a for a in ALGORITHMS if a.worlds(48)):
        schedule = algorithm.schedule(48)
        tracemalloc.start()
        for direct in (False, True):
            peer_plan(schedule, 3, direct=direct)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.3 * compile_bytes(schedule, 3), schedule


def test_many_ranks_fit():
    """512 ranks on a host of 24 GiB, half of which is free."""
    for name in ("one_shot", "two_shot_pull", "two_shot_push", "ring", "halving_doubling"):
        assert 512 * compile_bytes(find("all_reduce", name).schedule(512), 1) < 12 << 30


def test_what_takes_more():
    """One's own algorithm is compiled for every rank, and proven."""
    for n in (32, 256):
        known = find("all_reduce", "one_shot")
        own = replace(known, name="mine")
        assert compile_bytes(own.schedule(n), 1) == 280 * n * (n + 1)
        assert compile_bytes(known.schedule(n), 1) == 1024 * (n + 1) + 2048 * n


def test_a_plan_that_does_not_fit(monkeypatch):
    left = {"bytes": 1 << 40}
    monkeypatch.setattr(plan_room._C, "available_memory", lambda: left["bytes"])
    schedule = find("all_reduce", "one_shot").schedule(300)
    PlanRoom(300).check(schedule, 0)
    left["bytes"] = 300 * compile_bytes(schedule, 0) - 1
    with pytest.raises(
        MemoryError, match=rf"takes some \d+ bytes on each of 300 .*{left['bytes']}"
    ):
        PlanRoom(300).check(schedule, 0)
    PlanRoom(16).check(schedule, 0)  # few ranks need no look
    room = PlanRoom(299)
    left["bytes"] = 100
    with pytest.raises(MemoryError):
        room.check(schedule, 0)


def test_ranks_refuse_the_call_and_go_on(monkeypatch):
    left, gate = {"bytes": 1 << 40}, threading.Barrier(3)
    monkeypatch.setattr(plan_room, "_FEW_RANKS", 1)
    monkeypatch.setattr(plan_room._C, "available_memory", lambda: left["bytes"])

    def rank(comm):
        comm.barrier()
        gate.wait(10)
        left["bytes"] = 100
        gate.wait(10)
        with pytest.raises(MemoryError, match=r"^compiling"):
            comm.all_reduce(np.ones(3), algorithm="two_shot_pull")
        gate.wait(10)
        left["bytes"] = 1 << 40
        gate.wait(10)
        return comm.all_reduce(np.ones(3), algorithm="two_shot_pull").tolist()

    assert run_threads(3, rank) == [[3.0] * 3] * 3

"""Plans for which there is no memory are refused before they are compiled."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.runtime.calls import plan_room
from pycoll.runtime.calls.plan_room import PlanRoom, compile_bytes
from pycoll.testing import run_threads

PEAK = """
import resource, sys
from pycoll.algorithms import find
from pycoll.schedule.lowering.compile import peer_plan
schedule = find("all_reduce", {name!r}).schedule({n})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
peer_plan(schedule, 3, direct=False)
print(peak() - before)
"""


def test_the_estimate_is_what_compiling_takes():
    """Not less than half of it; the check is about orders of magnitude."""
    code = PEAK.format(name="two_shot_pull", n=200)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    said = compile_bytes(find("all_reduce", "two_shot_pull").schedule(200), 3)
    assert int(done.stdout) < 2 * said


def test_what_takes_more():
    """The whole world, where every rank reaches all; a few ranks in a ring."""
    for n in (32, 256):
        schedules = {name: find("all_reduce", name).schedule(n) for name in ("one_shot", "ring")}
        need = {name: compile_bytes(schedule, 1) for name, schedule in schedules.items()}
        assert need["one_shot"] == 280 * n * (n + 1)
        assert need["ring"] < 280 * 20 * n


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

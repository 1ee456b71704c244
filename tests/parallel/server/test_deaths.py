"""Ranks of a parameter server that die: an error on every rank, or the others go on."""

import itertools
import os
import signal

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import PeerLost
from pycoll.parallel import SGD, ParameterServer
from pycoll.testing import run_processes

MODES = {"sync": {"mode": "sync"}, "async": {"mode": "async"}, "ssp": {"mode": "ssp"}}
MODES["ssp"]["staleness"] = 1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(CrossEntropy):
    """A loss in whose backward pass a rank dies, some calls later."""

    def __init__(self, after):
        self.after = after

    def backward(self, saved, scale):
        self.after -= 1
        if self.after < 0:
            die()
        return super().backward(saved, scale)


class Fatal:
    """An optimizer in whose updates a rank dies, some calls later."""

    lr, slots = 0.1, ()

    def __init__(self, after):
        self._after = after

    def update(self, args, fused=True):
        self._after -= 1
        if self._after < 0:
            die()


def push_for_ever(comm, victim, **options):
    optimizer = Fatal(4 if comm.rank == victim else 10**9)
    with ParameterServer(comm, np.zeros(1000), servers=2, optimizer=optimizer, **options) as ps:
        if ps.serves:
            ps.serve()
        for step in itertools.count():
            if comm.rank == victim and step == 3:
                die()
            ps.push(np.ones(1000))
            ps.pull()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [1, 3])
def test_a_death_is_an_error_on_every_rank(mode, victim):
    def rank(comm):
        with pytest.raises(PeerLost, match=f"rank {victim} .*died"):
            push_for_ever(comm, victim, **MODES[mode])
        return True

    assert run_processes(4, rank, may_die=[victim]) == [
        -signal.SIGKILL if r == victim else True for r in range(4)
    ]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_the_others_go_on_without_a_worker(mode):
    """A worker dies in its third backward pass; the others take all of their steps."""
    steps = 8

    def rank(comm):
        loss = Dying(2) if comm.rank == 1 else CrossEntropy()
        options = {"optimizer": SGD(0.05), "bucket_bytes": 700, "on_death": "drop"}
        with ParameterServer(comm, mlp(), loss, servers=2, **options, **MODES[mode]) as ps:
            losses = []
            if ps.serves:
                ps.serve()
            else:
                for _ in range(steps):
                    losses.append(ps.step(batches(1, seed=ps.worker)).loss)
                ps.finish()
            found, report = ps.gather(), ps.report()
            state = ps.state_dict()
            assert all((state["parameters"][k] == x).all() for k, x in found.items())
            return losses, found, report

    results = run_processes(5, rank, may_die=[1])
    assert results.pop(1) == -signal.SIGKILL
    for losses, parameters, report in results:
        assert len(losses) in (0, steps)
        assert not losses or losses[-1] < losses[0]
        assert report.lost == [1]
        assert report.updates >= 2 * steps * 3
        for name, x in parameters.items():
            np.testing.assert_array_equal(x, results[0][1][name])
    if mode == "ssp":
        assert max(results[0][2].lead) <= 1


def test_two_workers_and_the_last_one():
    """Deaths one after the other, also of a worker that others wait for at the end."""

    def rank(comm):
        with ParameterServer(comm, np.zeros(3), mode="async", on_death="drop") as ps:
            if ps.serves:
                ps.serve()
            for step in range(4) if not ps.serves else ():
                if step == 3 - comm.rank and comm.rank in (1, 2):
                    die()
                ps.push(np.ones(3), lr=1.0)
                ps.pull()
            if not ps.serves:
                ps.finish()
            return ps.report().lost, ps.gather().tolist()

    results = run_processes(4, rank, may_die=[1, 2])
    assert results[0] == results[3]
    assert results[0][0] == [1, 2]
    assert -7 <= results[0][1][0] <= -4


def test_a_server_that_dies_takes_its_parameters_with_it():
    def rank(comm):
        with pytest.raises(PeerLost, match="rank 2, a server, died"):
            push_for_ever(comm, 2, mode="async", on_death="drop")
        return True

    assert run_processes(4, rank, may_die=[2]) == [True, True, -signal.SIGKILL, True]

"""The harness itself: it must not hang, leave anything behind, or hide a failure."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.testing import RankFailed, run_processes, run_threads


def test_results_come_in_rank_order(run):
    def rank(comm, base, step):
        time.sleep(0.02 * (comm.world_size - comm.rank))
        return base + step * comm.rank

    assert run(4, rank, 10, 5) == [10, 15, 20, 25]


def test_ranks_are_what_they_are_called():
    def rank(comm):
        return os.getpid()

    assert len({*run_processes(3, rank), os.getpid()}) == 4
    assert set(run_threads(3, rank)) == {os.getpid()}


def test_the_first_failure_is_shown_and_the_others_mentioned(run):
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.all_reduce(np.ones(3))

    with pytest.raises(RankFailed) as caught:
        run(3, rank)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert "in rank\n    raise KeyError" in text
    assert text.count("Traceback") == 1
    for peer in (0, 2):
        assert f"then rank {peer}: pycoll.errors.PeerLeft: rank 1" in text


def test_a_result_that_cannot_be_pickled_is_a_failure(capfd):
    with pytest.raises(RankFailed, match=r"^rank [01] failed:\nreturned what cannot be handed to"):
        run_processes(2, lambda comm: lambda: comm.rank)
    assert capfd.readouterr().err == ""


def test_a_rank_that_dies_is_a_failure():
    def rank(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 0 failed:\ndied with exit code -9"):
        run_processes(2, rank)


def test_a_rank_that_may_die_need_not():
    def rank(comm):
        if comm.rank == 0:
            os._exit(5)
        return "alive"

    assert run_processes(3, rank, may_die=[0, 1]) == [5, "alive", "alive"]


def test_the_deadline_tells_what_everybody_did():
    def sleep_for_ever(comm):
        if comm.rank == 1:
            signal.pause()
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_processes(2, sleep_for_ever, timeout=1, config=Config(heap_bytes=1 << 20))
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert "rank 0 did not end (limit 1 s):" in text
    assert "rank 1 did not end (limit 1 s):" in text
    assert text.count("in sleep_for_ever") == 2


def test_a_stopped_rank_does_not_answer():
    def rank(comm):
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankFailed, match=r"rank 0 did not end .*\nit does not answer"):
        run_processes(1, rank, timeout=0.5)


def test_the_deadline_of_threads():
    def rank(comm):
        if comm.rank == 1:
            time.sleep(2)

        comm.barrier()

    with pytest.raises(RankFailed, match=r"rank 0 did not end (.|\n)*rank 1 did not end"):
        run_threads(2, rank, timeout=0.5, config=Config(heap_bytes=1 << 20))
    time.sleep(2)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX"  # nobody reaps it here
    except FileNotFoundError:
        return True


def test_children_of_ranks_are_killed_too():
    def rank(comm):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    (pid,) = run_processes(1, rank)
    until = time.monotonic() + 5
    while not has_ended(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("n", [0, -1, "2", None])
def test_no_number_of_ranks(run, n):
    with pytest.raises(ArgumentError, match=f"n is {n!r}, expected a number of ranks, at least 1"):
        run(n, lambda comm: None)

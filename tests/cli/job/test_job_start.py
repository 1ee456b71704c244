"""Signals, time limits and failures that come while ranks are still being started."""

import os
import signal
import time

import pytest

from pycoll.cli.job import processes as launcher
from pycoll.cli.job.processes import Job
from pycoll.cli.job.wakeup import woken_by_signals

N = 6
SLEEP = ["-m", "timeit", "-n1", "-r1", "-s", "import time", "time.sleep(20)"]


@pytest.fixture
def start(monkeypatch):
    """Return a function that runs a job of which something happens after a rank was started."""

    def run(after, what, timeout_s=None, command=SLEEP):
        begin = Job._begin

        def watched(self, rank, *rest):
            begin(self, rank, *rest)
            if rank == after:
                what(self._ranks)

        monkeypatch.setattr(Job, "_begin", watched)
        with woken_by_signals() as wakeup:
            job = Job(N, timeout_s, wakeup)
            try:
                job.start(command, tagged=False)
                job.watch()
            finally:
                job.close()
        return job.conclude(), [process.returncode for process in job._ranks]

    return run


def test_a_signal_ends_the_start(start, capfd):
    status, ranks = start(2, lambda ranks: os.kill(os.getpid(), signal.SIGTERM))
    assert status == 128 + signal.SIGTERM
    assert ranks == [-signal.SIGTERM] * 3
    err = capfd.readouterr().err
    assert err == "pycoll run: only 3 of 6 ranks had been started when SIGTERM came\n"


def test_an_interrupt_that_ranks_ignore_ends_them(start, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)

    def interrupt(ranks):
        time.sleep(1.0)  # they ignore it from now on
        os.kill(os.getpid(), signal.SIGINT)

    command = [*SLEEP[:4], "-s", "import signal; signal.signal(2, signal.SIG_IGN)", *SLEEP[4:]]
    status, ranks = start(1, interrupt, command=command)
    assert status == 128 + signal.SIGINT
    assert ranks == [-signal.SIGTERM] * 2
    assert "only 2 of 6 ranks had been started when SIGINT came" in capfd.readouterr().err


def test_ranks_that_end_well_do_not_make_it_a_success(start, capfd):
    def interrupt(ranks):
        for process in ranks:
            process.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    status, ranks = start(1, interrupt, command=["-m", "this"])
    assert (status, ranks) == (128 + signal.SIGTERM, [0, 0])
    assert "only 2 of 6 ranks" in capfd.readouterr().err


def test_the_time_limit_counts_while_ranks_are_started(start, capfd):
    status, ranks = start(1, lambda ranks: time.sleep(0.5), timeout_s=0.5)
    assert (status, ranks) == (124, [-signal.SIGTERM] * 2)
    assert capfd.readouterr().err == (
        "pycoll run: the time of 0.5 s is over; still running: ranks 0, 1; only 2 of 6 ranks had "
        "been started\n"
    )


def test_the_time_limit_when_nothing_runs(start, capfd):
    def finish(ranks):
        for process in ranks:
            process.wait()
        time.sleep(1.0)

    status, ranks = start(1, finish, timeout_s=1.0, command=["-m", "this"])
    assert (status, ranks) == (124, [0, 0])
    assert "pycoll run: the time of 1 s is over" in capfd.readouterr().err


def test_a_failure_ends_the_start_after_the_grace(start, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_S", 0.0)

    def die(ranks):
        ranks[1].kill()
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)

    status, ranks = start(2, die)
    assert status == 128 + signal.SIGKILL
    assert ranks == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err

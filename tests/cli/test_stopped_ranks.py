"""Ranks that are stopped (SIGSTOP), or ignore the signal that is to end them."""

import os
import signal
import time

import pytest

from pycoll.cli.job import processes as launcher
from pycoll.cli.job.processes import Job
from pycoll.cli.job.wakeup import woken_by_signals

IGNORE = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
mark("up")
time.sleep(1000)
"""
STOP = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
mark("end")
"""


@pytest.fixture
def run(jobs):
    """Return a function that runs two ranks here; it sends itself signals once both are up."""

    def run(body, *signals):
        with woken_by_signals() as wakeup:
            job = Job(2, 60.0, wakeup)
            try:
                job.start([str(jobs.script(body))], tagged=False)
                if signals:
                    jobs.until(lambda: all((jobs.folder / f"up.{r}").exists() for r in range(2)))
                for number in signals:
                    os.kill(os.getpid(), number)
                    job._handle_events(1.0)
                job.watch()
            finally:
                job.close()
        return job.conclude(), [process.returncode for process in job._ranks]

    return run


def test_what_is_stopped_ends_after_all_others(run, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "STOPPED_S", 0.5, raising=False)
    status, ranks = run(STOP)
    err = capfd.readouterr().err
    assert (status, ranks) == (124, [0, -signal.SIGKILL])
    assert "stopped" in err
    assert "rank 1 (pid " in err
    assert "`kill -CONT " in err
    assert err.endswith("pycoll run: nobody continued the stopped ranks, which were killed: 1\n")


def test_what_is_stopped_can_be_continued(jobs):
    path = jobs.script(
        """
        mark("up")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            mark("on")
            time.sleep(1)
        """
    )
    with jobs.started(path, 2) as (job, pids):
        assert f"`kill -CONT {pids[1]}`" in job.stderr.readline()
        os.kill(pids[1], signal.SIGCONT)
        jobs.until((jobs.folder / "on.1").exists)
        _, err = job.communicate(timeout=jobs.deadline_s)
    assert (job.returncode, err) == (0, "")


def test_a_signal_ends_what_is_stopped(jobs):
    with jobs.started(jobs.script("mark('up')" + STOP), 2) as (job, pids):
        assert "stopped" in job.stderr.readline()
        job.send_signal(signal.SIGTERM)
        assert job.wait(launcher.STOPPED_S - 2) == 128 + signal.SIGTERM
        assert jobs.all_gone(pids)


def test_all_ranks_may_be_stopped_for_a_while(jobs):
    path = jobs.script("mark('up'); wait_for('go', [0])")
    with jobs.started(path, 2) as (job, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        (jobs.folder / "go.0").touch()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, err = job.communicate(timeout=jobs.deadline_s)
    assert (job.returncode, err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_ignore_a_signal_are_killed(run, monkeypatch, number):
    monkeypatch.setattr(launcher, "SIGNAL_GRACE_S", 0.3, raising=False)
    status, ranks = run(IGNORE, number)
    assert (status, ranks) == (128 + number, [-signal.SIGKILL] * 2)


def test_a_second_signal_kills_at_once(run, monkeypatch):
    monkeypatch.setattr(launcher, "SIGNAL_GRACE_S", 1000.0)
    status, ranks = run(IGNORE, signal.SIGINT, signal.SIGINT)
    assert (status, ranks) == (128 + signal.SIGINT, [-signal.SIGKILL] * 2)

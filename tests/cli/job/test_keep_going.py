"""``pycoll run --keep-going``: a job that ends with its last rank, not with the first failure."""

import signal
from pathlib import Path


def last_line(done):
    return done.stderr.splitlines()[-1]


def test_the_others_go_on(jobs):
    path = jobs.script(
        """
        mark("up")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            sys.exit(5)
        wait_for("up", range(n))
        time.sleep(3)  # longer than others are given otherwise
        mark("done")
        """
    )
    done = jobs.run("-n", 4, "--keep-going", path)
    assert done.returncode == 0
    assert {p.suffix for p in jobs.folder.glob("done.?")} == {".0", ".3"}
    assert last_line(done).startswith("pycoll run: rank ")
    assert "rank 1 was killed by SIGKILL" in last_line(done)
    assert "rank 2 exited with code 5" in last_line(done)
    assert last_line(done).endswith("; the others went on to their end")


def test_all_fail(jobs):
    done = jobs.run("-n", 3, "--keep-going", jobs.script("time.sleep(rank); sys.exit(3 + rank)"))
    assert done.returncode == 3
    assert last_line(done) == "pycoll run: rank 0 exited with code 3"


ONE_FAILS = """
mark("up")
if rank == 0:
    sys.exit(2)
time.sleep(1000)
"""


def test_the_time_limit_still_ends_it(jobs):
    done = jobs.run("-n", 3, "--keep-going", "--timeout", 1, jobs.script(ONE_FAILS))
    assert done.returncode == 124
    assert last_line(done) == "pycoll run: the time of 1 s is over; still running: ranks 1, 2"


def test_a_signal_still_ends_it(jobs):
    with jobs.started(jobs.script(ONE_FAILS), 3, "--keep-going") as (job, pids):
        jobs.until(lambda: not Path(f"/proc/{pids[0]}").exists())  # the job has seen it fail
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 128 + signal.SIGTERM
        assert jobs.all_gone(pids)


def test_those_who_fail_because_of_another_have_not_gone_on(jobs):
    path = jobs.script(
        """
        from pycoll.errors import PeerLeft
        if rank > 0:
            wait_for("done", [0])
            raise PeerLeft("rank 0 left")
        mark("done")
        """
    )
    done = jobs.run("-n", 3, "--keep-going", path)
    assert done.returncode == 1
    assert "the others went on" not in done.stderr


def test_a_rank_that_takes_its_time_to_end(jobs):
    path = jobs.script(
        """
        import atexit
        if rank == 1:
            atexit.register(time.sleep, 1)
            raise KeyError("early")
        """
    )
    done = jobs.run("-n", 3, "--keep-going", path)
    assert done.returncode == 0
    assert last_line(done) == (
        "pycoll run: rank 1 exited with code 1; the others went on to their end"
    )


def test_every_cause_is_shown(jobs):
    path = jobs.script(
        """
        if rank == 1:
            raise KeyError("the first")
        if rank == 2:
            time.sleep(1)
            raise ValueError("the second")
        time.sleep(2)
        """
    )
    done = jobs.run("-n", 3, "--keep-going", path)
    assert done.returncode == 0
    assert done.stderr.count("Traceback") == 2
    assert "ValueError: the second" in done.stderr.splitlines()

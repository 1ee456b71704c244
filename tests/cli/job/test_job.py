"""How jobs end: failures, signals, time limits, and what is left behind (nothing)."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def summary(stderr):
    """Return the last line, which the launcher writes."""
    return stderr.splitlines()[-1]


def test_the_first_failure_ends_the_others_and_is_shown_once(jobs):
    path = jobs.script(
        """
        mark("up")
        if rank == 2:
            wait_for("up", range(n))
            raise ValueError("the cause")
        time.sleep(1000)
        """
    )
    done = jobs.run("-n", 4, path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank_main" not in done.stderr
    assert done.stderr.splitlines()[-2] == "ValueError: the cause"
    assert summary(done.stderr) == (
        "pycoll run: rank 2 exited with code 1; the other ranks were stopped"
    )


def test_one_mistake_on_all_ranks_is_shown_once(jobs):
    done = jobs.run("-n", 4, jobs.script("raise KeyError('everywhere')"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count(": KeyError: 'everywhere' (") == 3


@pytest.mark.parametrize(
    "wrong",
    ["pycoll.init().all_gather_object(lambda: 1)", "pycoll.init(timeout='5')", "json.loads('')"],
)
def test_the_line_of_a_rank_names_no_library(jobs, wrong):
    done = jobs.run("-n", 2, jobs.script(f"import json, pycoll; {wrong}"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(lines) == 1
    assert "script.py:" in lines[0]


def test_the_line_of_a_consequence_tells_the_place_in_the_program(jobs):
    path = jobs.script(
        """
        from pycoll.config import Config
        from pycoll.errors import PeerLeft
        try:
            raise PeerLeft("rank 1 left")
        except PeerLeft:
            Config(timeout_s=-1)
        """
    )
    place = path.read_text().splitlines().index("    Config(timeout_s=-1)") + 1
    done = jobs.run("-n", 1, path)
    assert done.stderr.startswith("rank 0: ArgumentError: timeout=-1; ")
    assert done.stderr.splitlines()[0].endswith(f"({path}:{place})")


def test_a_traceback_is_written_at_once(jobs):
    path = jobs.script("raise ValueError('first line\\nsecond line')")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "1", str(path)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a datagram each write
    with ours, theirs:
        subprocess.run(command, cwd=ROOT, stderr=theirs, timeout=jobs.deadline_s)
        first = ours.recv(1 << 16).decode()
    assert first.startswith("Traceback (most recent call last):\n  File")
    assert first.endswith("\nValueError: first line\nsecond line\n")


def test_consequences_do_not_hide_the_cause(jobs):
    path = jobs.script(
        """
        from pycoll.errors import PeerLeft
        if rank != 1:
            mark("lost")
            raise RuntimeError("step failed") from PeerLeft("rank 1 left")
        wait_for("lost", [0, 2])
        time.sleep(0.5)
        sys.exit(7)
        """
    )
    done = jobs.run("-n", 3, path)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert done.stderr.count(": RuntimeError: step failed (") == 2
    assert summary(done.stderr) == "pycoll run: rank 1 exited with code 7"


def test_a_consequence_without_a_cause_is_shown(jobs):
    path = jobs.script(
        """
        from pycoll.errors import PeerLeft
        if rank == 1:
            raise PeerLeft("rank 0 has closed its communicator")
        """
    )
    done = jobs.run("-n", 2, path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "has closed its communicator" in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "what"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(5)", 5, "exited with code 5"),
        ("os._exit(255)", 255, "exited with code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_the_exit_status_is_kept(jobs, end, status, what):
    done = jobs.run("-n", 2, jobs.script(f"if rank == 1: {end}"))
    assert done.returncode == status
    assert done.stderr == (f"pycoll run: rank 1 {what}\n" if what else "")


def test_ranks_that_ignore_sigterm_are_killed(jobs):
    path = jobs.script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark("up")
        wait_for("up", range(n))
        if rank == 0:
            sys.exit(3)
        time.sleep(1000)
        """
    )
    with jobs.started(path, 3) as (job, pids):
        assert job.wait(jobs.deadline_s) == 3
        assert jobs.all_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_every_rank_once(jobs, number):
    path = jobs.script(
        f"""
        count = 0
        def handler(*_):
            global count
            count += 1
        signal.signal({int(number)}, handler)
        mark("up")
        while not count:
            time.sleep(0.01)
        time.sleep(0.3)
        print(rank, count)
        """
    )
    if signal.getsignal(number) == signal.SIG_IGN:  # under nohup; the job would inherit it
        signal.signal(number, signal.SIG_DFL)
    with jobs.started(path, 3, "--tag-output") as (job, _):
        job.send_signal(number)
        out, err = job.communicate(timeout=jobs.deadline_s)
    assert sorted(out.splitlines()) == ["[0] 0 1", "[1] 1 1", "[2] 2 1"]
    assert (job.returncode, err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_the_program_reach_the_ranks_and_end_nothing(jobs, number):
    path = jobs.script(
        f"""
        import subprocess
        other = subprocess.Popen(["sleep", "1000"])
        found = []
        signal.signal({int(number)}, lambda *_: found.append(rank))
        mark("up")
        for count in (1, 2):
            while len(found) < count:
                time.sleep(0.01)
            mark(f"had{{count}}")
        time.sleep(0.3)
        print(found, other.poll())
        other.kill()
        """
    )
    with jobs.started(path, 2) as (job, _):
        job.send_signal(number)
        jobs.until(lambda: all((jobs.folder / f"had1.{rank}").exists() for rank in range(2)))
        job.send_signal(number)
        out, err = job.communicate(timeout=jobs.deadline_s)
    assert sorted(out.splitlines()) == ["[0, 0] None", "[1, 1] None"]
    assert (job.returncode, err) == (0, "")


def test_ctrl_c_ends_a_rank_by_the_signal_whatever_showing_it_runs(jobs):
    path = jobs.script(
        """
        class Odd(Exception):
            def __str__(self):
                exec("1")
                return "odd"
        try:
            raise Odd
        except Odd:
            mark("up")
            time.sleep(1000)
        """
    )
    with jobs.started(path, 2) as (job, _):
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=jobs.deadline_s)
    assert "was killed by SIGINT" in err
    assert job.returncode == 128 + signal.SIGINT


def test_ctrl_c_ends_the_job_with_one_traceback(jobs):
    with jobs.started(jobs.script("mark('up'); time.sleep(1000)"), 3) as (job, pids):
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=jobs.deadline_s)
    assert job.returncode == 128 + signal.SIGINT
    assert err.count("Traceback") == 1
    assert jobs.all_gone(pids)


def test_ctrl_c_while_an_exception_is_shown(jobs):
    path = jobs.script(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Odd(Exception):
            def __str__(self):
                os.kill(os.getpid(), signal.SIGINT)
                return "the cause"
        raise Odd
        """
    )
    job = jobs.run("-n", 1, path)
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == 1
    assert "Odd: the cause" in job.stderr


def test_an_exception_is_shown_after_the_launcher_has_lost_its_file_name(jobs):
    """Python 3.14 removes it from the main module before it calls the hook."""
    lose = "import sys; sys.excepthook.__globals__.pop('__file__')"
    job = jobs.run("-n", 2, jobs.script(f"{lose}\nraise KeyError('everywhere')"))
    assert job.returncode == 1
    assert "sys.excepthook" not in job.stderr
    assert job.stderr.count("Traceback") == 1, job.stderr


def test_an_exception_without_a_text(jobs):
    path = jobs.script(
        """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError
        wait_for("seen", range(rank))
        try:
            raise Odd
        finally:
            mark("seen")
        """
    )
    job = jobs.run("-n", 2, path)
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == 1, job.stderr


def test_a_second_signal_does_not_wait(jobs):
    path = jobs.script("signal.signal(2, signal.SIG_IGN); mark('up'); time.sleep(1000)")
    with jobs.started(path, 2) as (job, pids):
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        assert job.wait(jobs.deadline_s) == 128 + signal.SIGINT
        assert jobs.all_gone(pids)


def test_timeout_names_the_ranks_still_running(jobs):
    path = jobs.script("mark('up'); time.sleep(0 if rank == 1 else 1000)")
    with jobs.started(path, 4, "--timeout", "3") as (job, pids):
        _, err = job.communicate(timeout=jobs.deadline_s)
    assert job.returncode == 124
    assert err == "pycoll run: the time of 3 s is over; still running: ranks 0, 2, 3\n"
    assert jobs.all_gone(pids)


def test_ranks_die_with_a_killed_launcher(jobs):
    path = jobs.script("signal.signal(15, signal.SIG_IGN); mark('up'); time.sleep(1000)")
    with jobs.started(path, 3) as (job, pids):
        assert not any(jobs.all_gone([pid]) for pid in pids)
        job.kill()
        jobs.until(lambda: jobs.all_gone(pids))


def test_what_a_rank_started_ends_with_the_job(jobs):
    path = jobs.script(
        """
        pid = os.fork()
        if pid == 0:
            mark("up")
            time.sleep(1000)
        wait_for("up", [0])
        print(pid)
        """
    )
    done = jobs.run("-n", 1, "--tag-output", path)
    assert done.returncode == 0
    assert jobs.all_gone([int(done.stdout.removeprefix("[0] "))])


def test_early_ranks_are_reaped_while_others_run(jobs):
    with jobs.started(jobs.script("mark('up'); rank == 0 and time.sleep(1000)"), 3) as (job, pids):
        jobs.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[1:]))
        assert job.poll() is None

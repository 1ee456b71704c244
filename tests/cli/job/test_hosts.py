"""``pycoll run --hosts``: ranks on several hosts, by a remote shell that stays on this one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launched import launched, outcome

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os
import numpy as np, pycoll
with pycoll.init(timeout=20) as comm:
    total = comm.all_reduce(np.full(5000, 1.0 + comm.rank))
    assert len(os.environ["PYCOLL_SECRET"]) >= 16
    print(comm.rank, os.environ["LOCAL_RANK"], total[0], "TCP" in comm.transport)
"""
APART = "unshare --ipc" if os.geteuid() == 0 else ""


@pytest.fixture
def job(tmp_path):
    """``job(text, *options, n=, hosts=)`` starts a job; `rsh` is what a host does."""
    rsh = tmp_path / "rsh"
    rsh.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/commands
case "$1" in
  nowhere) echo "no such host" >&2; exit 255;;
  silent?) echo up; exec sleep 60;;
  bare) exec sh -c "exec /no/python";;
esac
shift
exec {APART} sh -c "$*"
"""
    )
    rsh.chmod(0o755)
    with launched() as begin:

        def start(text, *options, n=4, hosts="localhost,127.0.0.1"):
            script = tmp_path / "script.py"
            script.write_text(text)
            command = [sys.executable, "-m", "pycoll", "run", "-n", str(n), "--hosts", hosts]
            return begin([*command, "--rsh", str(rsh), *options, str(script)])

        yield start


def test_ranks_of_two_hosts(job, tmp_path):
    status, out, err = outcome(job(PROGRAM, n=3))
    assert (status, err) == (0, "")
    expected = [f"{rank} {local} 6.0 {bool(APART)}" for rank, local in enumerate([0, 0, 1])]
    assert sorted(out.splitlines()) == expected
    commands = (tmp_path / "commands").read_text()
    assert commands.count("host_main") == 2
    assert os.environ["PYCOLL_SECRET"] not in commands


def test_lines_carry_the_rank_in_the_whole_job(job):
    status, out, err = outcome(job("print('hello')", "--tag-output", n=3))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] hello", "[1] hello", "[2] hello"]


def test_a_rank_that_fails_ends_the_job(job):
    text = """
import pycoll
comm = pycoll.init(timeout=20)
if comm.rank == 1:
    raise ValueError("on the second host")
comm.barrier()
"""
    status, _, err = outcome(job(text, n=2))
    assert status == 1
    assert "ValueError: on the second host" in err
    assert "rank 1 exited with code 1" in err


@pytest.mark.parametrize(
    ("hosts", "status", "told"),
    [
        ("localhost,nowhere", 255, r"cannot reach nowhere, or lost it; try `.*rsh nowhere true`"),
        ("localhost,bare", 127, f"{sys.executable} is not on bare"),
    ],
)
def test_a_host_that_cannot_be_used(job, hosts, status, told):
    began = time.monotonic()
    ended, _, err = outcome(job("import time; time.sleep(60)", n=2, hosts=hosts))
    assert ended == status
    assert re.search(told, err)
    assert time.monotonic() - began < 30


def test_another_version_there():
    command = [sys.executable, "-m", "pycoll.cli.job.host_main"]
    done = subprocess.run(
        command,
        input='{"version": "9.9"}\n',
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "has pycoll 0.1.0, the launcher 9.9" in done.stderr


def test_a_signal_reaches_all_hosts(job):
    process = job("import time\nprint('up', flush=True)\ntime.sleep(60)", n=2)
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    assert outcome(process)[0] == 128 + signal.SIGTERM


def test_a_signal_of_the_program_reaches_the_ranks_of_all_hosts(job):
    text = """
import signal, time
found = []
signal.signal(signal.SIGUSR1, lambda *_: found.append(1))
print("up", flush=True)
while not found:
    time.sleep(0.01)
print("had it")
"""
    process = job(text, n=2)
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGUSR1)
    status, out, _ = outcome(process)
    assert (status, out.split("\n")[:2]) == (0, ["had it"] * 2)


def test_the_second_signal_ends_a_job_whose_hosts_do_not_answer(job):
    process = job("", n=2, hosts="silent1,silent2")
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert outcome(process)[0] == 128 + signal.SIGINT
    assert time.monotonic() - began < 20


def test_the_time_is_over(job):
    status, _, err = outcome(job("import time; time.sleep(60)", "--timeout", "1", n=2))
    assert status == 124
    assert "the time of 1 s is over" in err


def test_no_remote_shell():
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", "--hosts", "a,b"]
    done = subprocess.run(
        [*command, "--rsh", "/no/shell", __file__],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "cannot start '/no/shell': No such file or directory; --rsh names another" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-n", "1", "--hosts", "a,b"], "expected at least a rank for each of 2 hosts"),
        (["-n", "2", "--hosts", "a,,b"], "expected different names"),
        (["-n", "2", "--hosts", "a,-oProxyCommand=x"], "no name like an option"),
        (["-n", "2", "--hosts", "a,b", "--keep-going"], "are for ranks of one host"),
        (["-n", "2", "--hosts", "a,b", "--rsh", ""], "--rsh is '', expected a command such as"),
        (["-n", "2", "--hosts", "a,b", "--rsh", "'ssh"], "no closing quotation"),
    ],
)
def test_what_cannot_be_asked_for(options, told):
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", *options, __file__],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_the_status_is_that_of_the_rank_that_failed_first_on_whatever_host(job, bad):
    """The others fail because of it, and those of the other host may have ended before it."""
    text = f"""
import sys, time, pycoll
comm = pycoll.init(timeout=20)
if comm.rank == {bad}:
    comm._session.leave(SystemExit(7))
    time.sleep(0.5)
    sys.exit(7)
comm.barrier()
"""
    status, _, err = outcome(job(text, n=4))
    assert status == 7
    assert f"rank {bad} exited with code 7" in err


def test_ranks_that_are_ended_because_others_failed_are_not_the_cause(job):
    text = """
import os, time, pycoll
comm = pycoll.init(timeout=20)
if comm.rank == 0:
    comm.abort("why")
    comm.barrier()
time.sleep(60)
"""
    status, _, err = outcome(job(text, n=2))
    assert (status, "rank 0 exited with code 1" in err) == (1, True)

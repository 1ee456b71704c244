"""Looking at a job on several hosts: each rank is as its own host sees it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from observe_jobs import until
from pycoll.errors import ArgumentError
from pycoll.observe.causes import find_causes, headline
from pycoll.observe.hosts import ask, together
from pycoll.observe.status import status

HERE = """sh -c 'test "$1" = there || exit 3; shift; exec sh -c "$*"' rsh"""
"""A remote shell that takes this host for another one."""
PROGRAM = "if rank: time.sleep(300)\nstep()"


def waiting(number):
    try:
        seen = status(number, 0.05)
        return seen if seen.ranks[0].waits and seen.ranks[1].state == "sleeps" else None
    except (ArgumentError, IndexError):
        return None


def blind(seen):
    """Return a status as a host has it that does not see rank 1."""
    unseen = {"state": "elsewhere", "pid": 0, "call": "", "site": "", "calls": 0, "waits": None}
    return replace(seen, ranks=[seen.ranks[0], replace(seen.ranks[1], **unseen)])


def told(seen):
    return headline(seen, find_causes(seen))


def test_a_rank_elsewhere_is_seen_by_its_own_host(job):
    with job(2, PROGRAM) as process:
        seen = until(lambda: waiting(process.pid))
        own = blind(replace(seen, ranks=[replace(r, skew_s=0) for r in seen.ranks]))
        own.ranks[0] = replace(own.ranks[0], waits=replace(own.ranks[0].waits, seconds=9))
        assert told(own).startswith("rank 1 is on another host, and has not come; rank 0 has")
        whole = together(own, ["there"], ask(own.key, ["there"], HERE))
        assert told(whole).startswith(
            f"rank 1 sleeps in its own code (process {seen.ranks[1].pid} on there: "
        )
        assert whole.ranks[1].call == seen.ranks[1].call
        assert whole.ranks[1].skew_s == pytest.approx(9, abs=0.1)
        assert whole.ranks[0].host == ""


def test_commands_ask_other_hosts(job):
    with job(2, PROGRAM) as process:
        until(lambda: waiting(process.pid))
        for words, want in (
            (("status", "--watch-hang", "0.5"), 1),
            (("top", "--rounds", "1", "--every", "0.6"), 0),
        ):
            command = [sys.executable, "-m", "pycoll", words[0], str(process.pid), *words[1:]]
            command += ["--hosts", "there", "--rsh", HERE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (want, "")
            assert done.stdout.startswith("rank 1 sleeps in its own code")


def test_hosts_that_do_not_answer_are_named(job):
    with job(2, PROGRAM) as process:
        seen = until(lambda: waiting(process.pid))
        for key, host, rsh, why in (
            (seen.key, "nobody", HERE, "nobody cannot tell the status of the job: it ended with"),
            (seen.key ^ 1, "there", HERE, "there cannot tell .* no rank of the job [0-9a-f]{16} r"),
            (
                seen.key,
                "there",
                "no-such-shell",
                "cannot start 'no-such-shell': .*; --rsh names another one",
            ),
        ):
            with pytest.raises(ArgumentError, match=why):
                together(seen, [host], ask(key, [host], rsh))


@pytest.mark.parametrize(
    ("rsh", "why"),
    [(" ", "--rsh is ' ', expected a command such as ssh"), ("'ssh", "no closing quotation")],
)
def test_no_words_of_a_remote_shell(rsh, why):
    with pytest.raises(ArgumentError, match=why):
        ask(1, ["there"], rsh)

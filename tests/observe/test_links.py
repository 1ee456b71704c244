"""Ranks that reach each other over TCP are seen, and so are their connections."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from namespaces import CABLE, addresses, ip, remote_shell, two_hosts
from observe_jobs import (
    COMMANDS,
    first_line,
    ready,
    said,
    told,
    until,
    wait_for_commands,
    wait_for_line,
)
from pycoll.observe.links import dead, slow, states
from pycoll.observe.report import torch_flight
from pycoll.observe.report.failure import explain, read_dumps
from pycoll.observe.status import status
from pycoll.observe.trace.merged import merge

ROOT = Path(__file__).resolve().parents[2]
RANK = ROOT / "tests/support/tcp_rank.py"


@contextlib.contextmanager
def tcp_job(folder, text, n=2, inside=None, **environ):
    """Start ranks and yield their processes; `inside` has words before the command of each."""
    meeting = folder / "meeting"
    meeting.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYCOLL_TIMEOUT": "60", **environ}
    ranks = []
    try:
        for rank in range(n):
            words = [sys.executable, str(RANK), str(rank), str(n), str(meeting), text]
            before = inside[rank] if inside else []
            ranks.append(subprocess.Popen([*before, *words], env=env))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


STAGED = {
    "sleeping": (
        "x = np.ones(3)\nfor _ in range(5): comm.all_reduce(x)\n"
        "if rank == 1: time.sleep(300)\ncomm.all_reduce(x)",
        r"rank 1 sleeps in its own code .*after all_reduce float64\[3\] at program.py:2 <module>"
        r".*; rank 0 has waited [\d.]+ s for it in all_reduce float64\[3\] at program.py:4",
    ),
    "deadlock": (
        "comm.recv(np.empty(1), src=1 - rank, tag=7)",
        r"deadlock of ranks 0, 1: rank [01] waits for rank [01] in recv\(tag=7\); rank",
    ),
    "posted": (
        "comm.irecv(np.empty(1), src=1 - rank, tag=9).wait()",
        r"deadlock of ranks 0, 1: rank [01] waits for rank [01] in recv\(tag=9\); rank",
    ),
}


@pytest.mark.parametrize("name", STAGED)
def test_ranks_over_tcp_are_seen(tmp_path, name):
    text, want = STAGED[name]
    with tcp_job(tmp_path, text) as ranks:
        wait_for_line(want, first_line, ranks[0].pid)
        seen = status(ranks[1].pid, 0.05)
        assert [rank.pid for rank in seen.ranks] == [process.pid for process in ranks]


@pytest.mark.skipif(os.geteuid() != 0, reason="another namespace is for root")
def test_calls_in_two_levels_are_seen_and_traced(tmp_path):
    """Ranks 0 and 1 share a host; the trace says of a wait what `status` does."""
    program, trace = tmp_path / "program.py", tmp_path / "trace"
    program.write_text(
        "import time, numpy as np, pycoll\n"
        "comm = pycoll.init()\n"
        "def step(): comm.all_reduce(np.ones(5000))\n"
        "for _ in range(30): step()\n"
        "if comm.rank == 2: time.sleep(300)\n"
        "step()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYCOLL_TRACE": str(trace), **place}
    apart = [[], [], ["unshare", "--ipc"]]
    want = (
        r"rank 2 sleeps in its own code .*after all_reduce float64\[5000\] at program.py:3 "
        r"step\(\); ranks 0, 1 have waited [\d.]+ s for it in all_reduce float64\[5000\] at program"
    )
    ranks = []
    try:
        for rank, before in enumerate(apart):
            words = [*before, sys.executable, str(program)]
            ranks.append(subprocess.Popen(words, env={**env, "RANK": str(rank)}))
        wait_for_line(want, first_line, ranks[0].pid)
        wait_for_line(want, told, trace)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    (group,) = (g for g in merge(trace).groups if len(g.members) == 3)
    made = group.enter_ns[:, [site == "program.py:3 step()" for site in group.site]]
    assert made.shape[1] >= 30
    assert not np.isnan(made[:, :30]).any()


@pytest.mark.timeout(400)
def test_a_slow_and_then_a_dead_connection(job, tmp_path):
    """Commands name it while the job runs, and afterwards, however the job has ended."""
    trace, way = tmp_path / "trace", "the connection from rank {} to rank {} is "
    text = "y = np.ones(200_000)\nwhile True: comm.all_reduce(y, out=y)"
    with two_hosts() as hosts:
        over = ["--hosts", ",".join(addresses(hosts)), "--rsh", remote_shell(tmp_path, hosts)]
        with job(2, text, *over, "--trace", str(trace), PYCOLL_TIMEOUT="60") as process:
            until(lambda: ready(process.pid))
            limit = ["tbf", "rate", "40mbit", "burst", "128k", "latency", "50ms"]
            words = ["tc", "-n", hosts[0], "qdisc", "add", "dev", CABLE, "root", *limit]
            if subprocess.run(words, check=False).returncode:
                pytest.skip("no tc")
            is_slow = (
                way.format(0, 1) + r"slow: it carries [\d.]+ MB/s and is full \d+% of the time"
            )
            wait_for_commands(is_slow, process.pid)
            wait_for_line(is_slow, said, "report", trace)
            is_dead = way.format(r"\d", r"\d") + "dead: nothing has come back for"
            for name, *words in COMMANDS:  # each has the 30 s after which the job fails
                until(lambda: status(process.pid, 1.0).ranks[0].calls_per_s)
                ip("-n", hosts[0], "link", "set", CABLE, "down")
                wait_for_line(is_dead, said, name, process.pid, *words)
                ip("-n", hosts[0], "link", "set", CABLE, "up")
            ip("-n", hosts[0], "link", "set", CABLE, "down")
            wait_for_line(is_dead, said, "report", trace)
            process.communicate(timeout=60)
        assert re.match(is_dead, said("report", trace))


def test_calls_over_tcp_are_traced(tmp_path):
    trace = tmp_path / "trace"
    text = "for i in range(40):\n    time.sleep(0.004 * rank)\n    comm.all_reduce(np.ones(500))"
    with tcp_job(tmp_path, text, PYCOLL_TRACE=str(trace)) as ranks:
        assert [process.wait(30) for process in ranks] == [0, 0]
    merged = merge(trace)
    (group,) = merged.groups
    assert group.enter_ns.shape[0] == 2
    assert group.enter_ns.shape[1] >= 40
    assert not np.isnan(group.enter_ns).any()
    assert {site for site in group.site if site} >= {"program.py:3 <module>()"}
    assert (group.waited_ns <= group.leave_ns - group.enter_ns + 1000).all()
    assert np.median(group.waited_ns[0]) > 1e6  # rank 0 waits for rank 1
    assert told(trace).startswith("rank 1 enters ")


def test_waiting_calls_over_tcp_are_counted(tmp_path):
    text = (
        "x = np.ones(3)\ncomm.barrier()\nif rank: time.sleep(300)\n"
        "works = [comm.all_reduce(x, async_op=True) for _ in range(5)]\nworks[-1].wait()"
    )
    with tcp_job(tmp_path, text) as ranks:
        wait_for_line("rank 1 sleeps in its own code", first_line, ranks[0].pid)
        assert [rank.queued for rank in status(ranks[0].pid, 0.05).ranks] == [4, 0]


def test_dumps_over_tcp(tmp_path):
    """Each rank writes its own calls; together they tell which of them differ."""
    text = (
        "x = np.ones(3)\ncomm.barrier()\nif rank == 2: comm.broadcast(x)\nelse: comm.all_reduce(x)"
    )
    with tcp_job(tmp_path, text, 3, PYCOLL_DUMP=str(tmp_path / "dumps")) as ranks:
        assert 0 not in [process.wait(30) for process in ranks]
    dumps = read_dumps(tmp_path / "dumps")
    assert [dump["rank"] for dump in dumps] == [0, 1, 2]
    assert re.match(
        r"rank 2 left the common path at call 2: broadcast at program.py:3 <module>\(\), where the "
        r"others called all_reduce at program.py:4 <module>\(\)",
        explain(dumps)[0],
    )
    names = [entry["profiling_name"] for entry in torch_flight.ranks(dumps)[2]["entries"]]
    assert names[-1] == "gloo:broadcast"


def test_clocks_of_two_hosts(tmp_path):
    """Ranks whose monotonic clocks differ by 1000 s come onto one clock; the error is stated."""
    ahead = ["unshare", "--time", "--fork", "--kill-child", "--monotonic=1000"]
    if subprocess.run([*ahead, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespaces")
    trace = tmp_path / "trace"
    text = "for _ in range(2000): comm.all_reduce(np.ones(1))"
    with two_hosts() as hosts:
        inside = [["ip", "netns", "exec", host, *ahead * i] for i, host in enumerate(hosts)]
        with tcp_job(tmp_path, text, 2, inside, PYCOLL_TRACE=str(trace)) as ranks:
            assert [process.wait(60) for process in ranks] == [0, 0]
    merged = merge(trace)
    shift = {s.rank: merged.shift_ns[id(s)] for s in merged.streams}
    error = abs(shift[1] - shift[0] + 1000e9)
    assert error <= merged.clock_error_ns <= 50_000
    assert merged.clock.startswith("calls, which nobody leaves")


def link(**changed):
    usual = dict(
        seen_ns=10**9,
        sent=0,
        received=0,
        unacked=0,
        busy_us=0,
        rtt_us=200,
        retransmits=0,
        ack_age_ms=0,
        retries=0,
    )
    return usual | changed


def test_which_connection_is_slow():
    before = {0: {1: link(), 2: link()}}
    full = {"seen_ns": 2 * 10**9, "busy_us": 900_000, "rtt_us": 5000}
    after = {0: {1: link(sent=10**7, **full), 2: link(sent=10**9, **full)}}
    (found,) = slow(states(before, after))
    assert (found.rank, found.peer) == (0, 1)
    assert found.busy == pytest.approx(0.9)
    assert found.rate == pytest.approx(10**7 / 0.9)
    # Less than its like, though not slow by itself.
    after[0][1] = link(sent=10**8, **full)
    assert [s.peer for s in slow(states(before, after))] == [1]
    # Not one over which small messages go, each after the answer to the last.
    after[0][1] = link(sent=700_000, **full | {"rtt_us": 4060})
    assert slow(states(before, after)) == []
    # Not one that is seldom used.
    after[0][1] = link(sent=10**6, seen_ns=2 * 10**9, busy_us=50_000)
    assert slow(states(before, after)) == []


def test_which_connection_is_dead():
    before = {0: {1: link()}, 1: {0: link()}}
    silent = {"ack_age_ms": 5000, "retries": 4}
    after = {0: {1: link(unacked=100, **silent)}, 1: {0: link(**silent)}}  # nothing was sent
    (found,) = dead(states(before, after))
    assert found.words() == (
        "the connection from rank 0 to rank 1 is dead: nothing has come back for 5 s, though "
        "100 bytes were sent, 4 times"
    )
    assert dead(states(before, {0: {1: link(unacked=100, ack_age_ms=5000)}})) == []

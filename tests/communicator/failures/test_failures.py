"""Ranks that die, raise or leave: what the others hear of it, and how soon."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from faults import WAITS, Event, X, expect
from pycoll.errors import PeerLeft, PeerLost
from pycoll.testing import RankFailed, run_processes


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank(wait):
    event = Event()

    def rank(comm):
        comm.all_reduce(X)
        if comm.rank == 1:
            time.sleep(0.1)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(comm, PeerLost, WAITS[wait], event)

    first, code, third = run_processes(3, rank, may_die=[1])
    assert code == -signal.SIGKILL
    assert first[0] == third[0] == "PeerLost"
    assert "rank 1 (process" in first[1]
    assert "died; its last call was all_reduce(float64[100]" in first[1]
    assert "test_failures.py:" in first[1]


def test_the_last_call_is_one_of_the_program(tmp_path):
    """What pycoll calls to make a communicator is no call that a program knows."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pycoll\n"
        "comm = pycoll.init()\n"
        "if comm.rank == 1: os.kill(os.getpid(), 9)\n"
        "try: comm.barrier()\n"
        "except pycoll.PeerLost as error: print(error)\n"
    )
    words = ["run", "-n", "2", "--keep-going", str(program)]
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", *words], capture_output=True, text=True, timeout=100
    )
    assert " died; its last call was pycoll.init() at program.py:2 <module>(). " in done.stdout

    def rank(comm):
        comm.split(0)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as error:
            comm.barrier()
        return str(error.value)

    texts = run_processes(3, rank, may_die=[1])
    where = r"split\(\) at test_failures.py:\d+ rank\(\)\. "
    assert re.search(f" died; its last call was {where}", texts[0])
    assert texts[2] == texts[0]


@pytest.mark.parametrize("early", [True, False], ids=["before the call", "while the others wait"])
def test_a_killed_rank_with_much_memory(early):
    event = Event()

    def rank(comm):
        if comm.rank == 1:
            ballast = np.ones(256 << 17)
            comm.barrier()
            time.sleep(0 if early else 0.2)
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
            return ballast
        comm.barrier()
        time.sleep(0.2 if early else 0)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    assert run_processes(3, rank, may_die=[1]) == ["PeerLost", -signal.SIGKILL, "PeerLost"]


@pytest.mark.parametrize("victims", [[0], [0, 1, 2]], ids=["the first", "all but one"])
def test_several_victims(victims):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank in victims:
            event.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    results = run_processes(4, rank, may_die=victims)
    assert results == [-signal.SIGKILL if r in victims else "PeerLost" for r in range(4)]


def test_a_crash_and_a_silent_end():
    def rank(comm):
        event = Event()
        event.happens()
        if comm.rank == 1:
            os._exit(3)
        return expect(comm, PeerLost, WAITS["all_reduce"], event)[0]

    assert run_processes(2, rank, may_die=[1]) == ["PeerLost", 3]


@pytest.mark.parametrize("kill_after_ms", [0, 1, 3, 10, 30])
def test_a_rank_that_is_killed_in_the_middle(kill_after_ms):
    """Wherever it was: the survivors raise, and until then every result is right."""

    def rank(comm):
        if comm.rank == 1:
            pid = os.getpid()
            killer = threading.Timer(kill_after_ms / 1000, os.kill, (pid, signal.SIGKILL))
            killer.start()
        x = np.arange(50_000.0)

        def work():
            while True:
                result = comm.all_reduce(x, algorithm="ring", order="any")
                assert (result[::999] == 3 * x[::999]).all()

        with pytest.raises(PeerLost):
            work()
        return True

    assert run_processes(3, rank, may_die=[1]) == [True, -signal.SIGKILL, True]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("error", [KeyError("lost key"), SystemExit(3)], ids=repr)
def test_a_rank_that_raises(run, wait, error):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.05)
            event.happens()
            raise type(error)(*error.args)
        text = expect(comm, PeerLeft, WAITS[wait], event)[1]
        assert f"left: {type(error).__name__}: {error}" in text
        return None

    with pytest.raises(RankFailed, match=r"^rank 1 failed:(.|\n)*") as caught:
        run(3, rank)
    assert str(caught.value).count("failed:") == 1
    assert "then rank" not in str(caught.value)


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_closes(run, wait):
    event = Event()

    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            event.happens()
            comm.close()
            return None
        return expect(comm, PeerLeft, WAITS[wait], event)[1]

    results = run(2, rank)
    assert re.search(r"rank 1\b.*closed", results[0])


def test_closing_after_the_last_call_disturbs_nobody(run):
    def rank(comm):
        total = 0.0
        for root in range(comm.world_size):
            total += float(comm.broadcast(X, root=root)[0])
        comm.reduce(X)
        comm.close()
        return total

    for _ in range(20):
        assert run(3, rank) == [3.0] * 3


JOIN = """
import os, resource, sys
import pycoll
rank = os.environ["PYCOLL_RANK"]
if rank == "1":
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    pycoll.init(heap_bytes=int(sys.argv[1]), timeout=30)
except pycoll.errors.CollError as error:
    os.write(1, f"{rank} {type(error).__name__} {str(error).splitlines()[0]}\\n".encode())
"""


@pytest.mark.parametrize(("heap_bytes", "what"), [(2 << 30, "map the heap"), (4096, "start the t")])
def test_a_rank_that_cannot_join(tmp_path, heap_bytes, what):
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(script), str(heap_bytes)]
    stacks = "ulimit -S -s 4000000 && "  # of threads, in KiB: more than rank 1 may have
    start = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", stacks + 'exec "$@"', "sh", *command], capture_output=True, timeout=60
    )
    assert time.monotonic() - start < 20
    first, second = sorted(done.stdout.decode().splitlines())
    assert re.match(rf"0 PeerLeft rank 1 \(process \d+\) left: .*cannot {what}", first), first
    assert second.startswith(f"1 TransportError cannot {what}")


DECLINE = """
import ctypes, os, resource, sys, time
import pycoll
rank, how, order, path = os.environ["PYCOLL_RANK"], *sys.argv[1:]
mark, settings = open(path, "ab", 0), {}
control = int(os.environ["PYCOLL_CONTROL_FD"])
while os.fstat(control if order == "later" else mark.fileno()).st_size == 0:
    if rank == ("0" if order == "later" else "1"):
        break
    time.sleep(0.01)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if rank == "1" and how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
elif rank == "1" and how == "rights":
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE; what comes next does that, too
    os.getuid() or os.setresuid(1, 1, 1)
elif rank == "1":
    settings = {"cell_bytes": 1 << 17}
try:
    pycoll.init(timeout=30, **settings)
except pycoll.errors.CollError as error:
    os.write(1, f"{rank} {type(error).__name__} {str(error).splitlines()[0]}\\n".encode())
if rank == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mark.write(b"gone")
    time.sleep(60)  # its end would tell the other one
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("how", "order", "what"),
    [
        ("limit", "first", "cannot size the control segment"),
        ("rights", "first", "cannot open /proc/self/fd/"),
        ("rights", "later", "cannot open /proc/self/fd/"),
        ("settings", "later", "the control segment has"),
    ],
)
def test_a_rank_without_control_memory_tells_the_others(tmp_path, how, order, what):
    script = tmp_path / "decline.py"
    script.write_text(DECLINE)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", script, how, order]
    start = time.monotonic()
    done = subprocess.run([*command, tmp_path / "mark"], capture_output=True, timeout=60)
    assert time.monotonic() - start < 20
    first, second = sorted(done.stdout.decode().splitlines())
    assert second.startswith(f"1 TransportError {what}")
    told = rf"rank 1 \(process \d+\) left: .*{what}" if order == "later" else "another rank cannot"
    assert re.match(f"0 PeerLeft {told}", first), first

"""Looking at a job leaves it alone; a hang is reported; several jobs are told apart."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from observe_jobs import ready, until
from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.observe import find as find_module
from pycoll.observe.causes import headline
from pycoll.observe.find import find, jobs
from pycoll.observe.page import HEAD, lines
from pycoll.observe.status import status
from pycoll.observe.trace.merged import merge
from pycoll.testing import run_processes


def command(*words):
    return [sys.executable, "-m", "pycoll", *map(str, words)]


def waits(number):
    """Whether rank 0 of a job waits for another one."""
    try:
        return status(number, 0.05).ranks[0].waits
    except (ArgumentError, IndexError):
        return False


def test_killed_watchers_do_not_disturb(job):
    text = "for i in range(400):\n    step()\n    time.sleep(0.005)\nprint('end', rank)"
    with job(2, text) as process:
        until(lambda: ready(process.pid))
        watchers = [
            subprocess.Popen(command("status", process.pid, "--watch-hang", 60)),
            subprocess.Popen(command("top", process.pid, "--every", 0.1), stdout=subprocess.PIPE),
        ]
        time.sleep(0.4)
        for watcher, number in zip(watchers, (signal.SIGKILL, signal.SIGTERM), strict=True):
            watcher.send_signal(number)
            watcher.wait()
            if watcher.stdout:
                watcher.stdout.close()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.split("\n")) == ["", "end 0", "end 1"]


@pytest.mark.parametrize("settings", ["PYCOLL_TRACE", "PYCOLL_METRICS_PORT"])
def test_a_program_that_closes_nothing_ends(job, tmp_path, settings):
    """Also while what watches it holds a lock, and calls of its exit handlers are traced."""
    value = {"PYCOLL_TRACE": str(tmp_path / "trace"), "PYCOLL_METRICS_PORT": str(free_port())}
    text = (
        "import atexit\n"
        "from pycoll.runtime.calls.call_sites import CallSites\n"
        "texts = CallSites.texts\n"
        "CallSites.texts = lambda sites: time.sleep(0.2) or texts(sites)\n"
        "atexit.register(step)\n"
        "for _ in range(50):\n"
        "    time.sleep(0.01)\n"
        "    comm.barrier()\n"
    )
    with job(1, text, **{settings: value[settings]}) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    if settings == "PYCOLL_TRACE":
        (group,) = merge(tmp_path / "trace").groups
        assert group.site[-1] == "program.py:8 step()"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_hang_is_reported(job):
    with job(2, "if rank: time.sleep(300)\nstep()") as process:
        until(lambda: waits(process.pid))
        out = subprocess.run(
            command("status", process.pid, "--watch-hang", 1, "--json"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (out.returncode, out.stderr) == (1, "")
        found = json.loads(out.stdout)
        assert found["headline"].startswith("rank 1 sleeps in its own code")
        assert found["findings"][0]["waited_s"] >= 1
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
        assert found["ranks"][1]["skew_s"] >= 1 > found["ranks"][0]["skew_s"] == 0


def test_traffic_is_counted(job):
    """By collective; of the calls that no look has seen, others tell."""
    program = "while True:\n    time.sleep(0.02)\n    comm.broadcast(x)\n    step()\n    step()"
    with job(2, program) as process:
        until(lambda: ready(process.pid))
        seen = status(process.pid, 1.0)
    (calls, nbytes), (some, _) = seen.traffic["all_reduce"], seen.traffic["broadcast"]
    rate = seen.ranks[0].calls_per_s
    assert calls + some == pytest.approx(rate, rel=0.3)
    assert calls == pytest.approx(2 * some, rel=0.3)
    assert nbytes == pytest.approx(calls * 4000)
    assert f"all_reduce: {calls:,.0f} calls/s, {nbytes / 1e9:.3g} GB/s a rank" in lines(seen)[2]


def test_skew_is_told(job):
    """A rank that sleeps 20 ms more before each call enters that much later."""
    with job(2, "while True:\n    time.sleep(0.02 * rank)\n    step()") as process:
        until(lambda: ready(process.pid))
        seen = status(process.pid, 1.0)
        cells = dict(zip(HEAD, lines(seen)[1][0], strict=True))
    assert seen.ranks[0].skew_s == 0
    assert seen.ranks[1].skew_s == pytest.approx(0.02, rel=0.3)
    assert (cells["rank"], cells["skew"]) == ("1", f"{seen.ranks[1].skew_s * 1e3:.3g} ms")


def test_waiting_calls_are_counted(job):
    """The first of five calls has begun, and waits for rank 1; four are in the queue."""
    program = (
        "if rank: time.sleep(300)\nworks = [comm.all_reduce(x, async_op=True) for _ in range(5)]"
    )
    with job(2, program + "\nworks[-1].wait()") as process:
        until(lambda: waits(process.pid))
        seen = until(lambda: (now := status(process.pid, 0.05)).ranks[0].queued and now)
        rows = {row[0]: dict(zip(HEAD, row, strict=True)) for row in lines(seen)[1]}
    assert [rank.queued for rank in seen.ranks] == [4, 0]
    assert (rows["0"]["queue"], rows["1"]["queue"]) == ("4", "")


@pytest.mark.parametrize("columns", [200, 90])
def test_top_draws(job, columns):
    """No column is cut, whatever the terminal."""
    pytest.importorskip("rich")
    with job(2, "if rank: time.sleep(300)\nstep()") as process:
        until(lambda: waits(process.pid))
        out = subprocess.run(
            command("top", process.pid, "--every", 0.7, "--rounds", 1),
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": str(columns)},
        )
        assert out.returncode == 0
        assert "rank 1 sleeps in its own code" in out.stdout
        head = out.stdout[out.stdout.index("rank  ") :].splitlines()[0]
        assert "newest call" in head
        assert ("pid" in head) == (columns == 200)
        assert "waits for" in head
        assert "-> 1" in out.stdout


def test_jobs_are_told_apart():
    """A job is named by the process that has started its ranks; here that is this one."""

    def rank(comm):
        half = comm.split(comm.rank // 2)
        comm.barrier()
        own = find(os.getpid())
        seen = status(os.getpid(), 0.05)
        with pytest.raises(ArgumentError, match="process 0 is no launcher or rank of a job"):
            find(0)
        comm.barrier()
        half.close()
        return own.number, len(own.segments), len(seen.ranks), os.getpid()

    number, segments, ranks, pid = run_processes(4, rank)[0]
    assert (number, segments, ranks) == (os.getpid(), 3, 4)
    with pytest.raises(ArgumentError, match="process 1 is no launcher or rank of a job"):
        find(1)
    assert pid not in {job.number for job in jobs()}


def test_a_job_is_found_by_what_has_started_its_launcher(job):
    with job(2, "time.sleep(300)") as one:
        until(lambda: ready(one.pid))
        assert find(os.getpid()).number == one.pid
        with job(2, "time.sleep(300)") as other:
            until(lambda: ready(other.pid))
            with pytest.raises(ArgumentError, match="which job") as error:
                find(os.getpid())
    listed = [int(line.split()[0]) for line in str(error.value).splitlines()[1:]]
    assert listed == sorted([one.pid, other.pid])


def test_only_boards_are_looked_at():
    fd = os.memfd_create("pycoll-board", os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(_C.EngineError, match="there is no board of a rank"):
            _C.BoardSight(fd)
        os.write(fd, bytes(range(256)) * 64)
        with pytest.raises(_C.EngineError, match="there is no board of a rank"):
            _C.BoardSight(fd)
        os.pwrite(fd, int("314452424C4F4350", 16).to_bytes(8, "little") + b"\x63\0\0\0", 0)
        with pytest.raises(_C.EngineError, match="the job has ABI 99"):
            _C.BoardSight(fd)
        os.pwrite(fd, (6).to_bytes(4, "little"), 8)  # the rest is no board of this size
        with pytest.raises(_C.EngineError, match="another size"):
            _C.BoardSight(fd)
    finally:
        os.close(fd)


def test_only_control_memory_is_looked_at():
    fd = os.memfd_create("pycoll-control")
    try:
        with pytest.raises(_C.EngineError, match="no control segment has been laid out"):
            _C.Sight(fd)
        os.write(fd, bytes(range(256)) * 64)
        with pytest.raises(_C.EngineError, match="no control segment has been laid out"):
            _C.Sight(fd)
        magic = int("314745534C4F4350", 16).to_bytes(8, "little")
        os.pwrite(fd, magic + (6).to_bytes(4, "little"), 0)  # the rest is no geometry of this size
        with pytest.raises(_C.EngineError, match=r"world_size|cell_bytes|another size|iteration"):
            _C.Sight(fd)
        os.pwrite(fd, (99).to_bytes(4, "little"), 8)
        with pytest.raises(_C.EngineError, match="the job has ABI 99"):
            _C.Sight(fd)
    finally:
        os.close(fd)


def test_what_only_a_child_of_a_dead_rank_holds_is_not_asked_for(job, monkeypatch):
    text = (
        "import os, time, pycoll\ncomm = pycoll.init()\npid = os.fork()\n"
        "if pid == 0: time.sleep(100)\nprint(pid, os.getpid(), flush=True)\nos._exit(0)"
    )
    over = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    child, rank = map(int, over.stdout.readline().split())
    over.wait(timeout=20)
    try:
        with job(2, "while True: step()") as process:
            until(lambda: ready(process.pid))
            mine = rank, process.pid
            two = [found for found in jobs() if found.number in mine]
            monkeypatch.setattr(find_module, "jobs", lambda: two)
            assert len(two) == 2
            assert find().launcher == process.pid
            assert headline(status(rank), []) == "no rank runs any more"
    finally:
        os.kill(child, signal.SIGKILL)
        over.stdout.close()

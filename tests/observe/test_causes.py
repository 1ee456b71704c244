"""Staged problems: the first line names the rank and the cause."""

import os
import re
import signal

import pytest

from observe_jobs import first_line, said, told, until, wait_for_commands, wait_for_line
from pycoll.observe import causes
from pycoll.observe.causes import find_causes, headline
from pycoll.observe.page import lines
from pycoll.observe.report import text as report
from pycoll.observe.report.analysis import analyse
from pycoll.observe.status import RankStatus, Status, Wait, status
from pycoll.observe.trace.merged import merge

STAGED = {
    "sleeping": (
        3,
        "if rank == 1: time.sleep(300)\nstep()",
        r"rank 1 sleeps in its own code \(process \d+: \d+% of a core\) after all_reduce "
        r"float32\[1000\] at program.py:8 step\(\); ranks 0, 2 have waited [\d.]+ s for it "
        r"in all_reduce float32\[1000\] at program.py:8 step\(\)",
    ),
    "stopped": (
        2,
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nstep()",
        r"rank 1 is stopped by a signal or a debugger .*; rank 0 has waited",
    ),
    "computing": (
        2,
        "while rank == 0: pass\nstep()",
        r"rank 0 (computes in its own code|waits for a core) .*; rank 1 has waited",
    ),
    "deadlock": (
        2,
        "comm.recv(np.empty(1), src=1 - rank, tag=7)",
        r"deadlock of ranks 0, 1: rank [01] waits for rank [01] in recv\(tag=7\); rank",
    ),
    "two communicators": (
        2,
        "other = comm.dup()\n[comm, other][rank].barrier()",
        r"deadlock of ranks 0, 1: rank \d waits for rank \d in barrier at program.py:\d+ <module>",
    ),
    "chain": (
        3,
        "pair = comm.split(0 if rank else None)\n"
        "if rank == 2: time.sleep(300)\n"
        "if pair: pair.barrier()\n"
        "step()",
        r"rank 2 sleeps in its own code .* after .*; ranks 0, 1 have waited",
    ),
    "another branch": (
        3,
        "try:\n"
        "    comm.broadcast(x) if rank == 2 else step()\n"
        "except pycoll.CollError:\n"
        "    time.sleep(300)",
        r"rank 2 left the common path: broadcast float32\[1000\] at program.py:12 <module>\(\), "
        r"where the others called all_reduce float32\[1000\] at program.py:8 step\(\)",
        r"rank 2 left the common path: broadcast.* at program.py:12 <module>\(\), where the others "
        r"called all_reduce.* at program.py:8 step\(\)",
    ),
    "more samples": (
        3,
        "while True:\n"
        "    time.sleep(0.04 if rank == 2 else 0.001)\n"
        "    step()\n"
        "    comm.note_step(40 if rank == 2 else 1)",
        r"rank 2 has more to do between calls than the others \(process \d+: \d+% of a core\); "
        r"the others wait \d+% of the time, \d+% of that for it, and it waits \d+%",
        r"rank 2 enters \d+% of the calls last, for it has 40 samples a step where the mean is 14",
    ),
    "pages from a disk": (
        2,
        "import mmap\n"
        "with open(f'pages{rank}', 'wb') as file: file.write(bytes(1 << 22))\n"
        "file = os.open(f'pages{rank}', os.O_RDONLY)\n"
        "while True:\n"
        "    if rank == 1:\n"
        "        os.sync()\n"
        "        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "        with mmap.mmap(file, 0, prot=mmap.PROT_READ) as pages:\n"
        "            pages.madvise(mmap.MADV_RANDOM)\n"
        "            sum(pages[::4096])\n"
        "    step()",
        r"rank 1 is swapped out \(process \d+: 0 MiB of its memory in swap, [\d,]+ pages/s come "
        r"from a disk\)",
        r"rank 1 (enters \d+% of the calls last, for it )?is swapped out \(.*pages/s",
    ),
    "cores": (
        3,
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while True:\n"
        "    until = time.thread_time() + 0.02\n"
        "    while time.thread_time() < until: pass\n"
        "    step()",
        r"rank \d .*(has no core|waits for a core)",
    ),
    "tiny buckets": (
        2,
        "while True: [comm.all_reduce(x[:8]) for _ in range(1000)], time.sleep(0.002)",
        r"all ranks make [\d,]+ calls/s of at most 16 KiB, \d+% of the time, such as rank 0 "
        r"all_reduce float32\[8\] at program.py:11 <\w+>\(\)|rank \d .*has no core",
        r"all ranks make [\d,]+ calls of at most 16 KiB at program.py:11 <\w+>\(\)"
        r"|rank \d .*has no core",
    ),
    "growing memory": (
        2,
        "kept, begin = [], time.monotonic()\n"  # by 3% a second, however slow the machine is
        "while True:\n"
        "    time.sleep(0.005)\n"
        "    size = 800 * (1.03 ** (time.monotonic() - begin) - 1)\n"
        "    while rank and len(kept) < min(8000, size):\n"
        "        kept.append(np.ones(1 << 15))\n"
        "    step()",
        r"the memory of rank 1 grows by \d+ MiB/s, and is \d+ MiB \(process \d+\)",
        r"the memory of rank 1 grows by [\d.]+ (MiB|GiB)/s, to [\d.]+ (MiB|GiB) at the end",
    ),
}
"""Ranks, program, and what the first line of `status` says, and of `report` if it is another."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STAGED)
def test_the_first_line_names_rank_and_cause(job, name, tmp_path, monkeypatch):
    n, program, *want = STAGED[name]
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace"
    with job(n, program, PYCOLL_TRACE=str(trace)) as process:
        wait_for_commands(want[0], process.pid)
        wait_for_line(want[-1], told, trace)
    assert re.match(want[-1], said("report", trace))  # on what killed ranks have left


def test_a_rank_that_is_continued_is_well_again(job):
    program = "os.kill(os.getpid(), signal.SIGSTOP) if rank else None\nwhile True: step()"
    with job(2, program) as process:
        until(lambda: (first_line(process.pid) or "").startswith("rank 1 is stopped"))
        os.kill(status(process.pid).ranks[1].pid, signal.SIGCONT)
        until(
            lambda: {f.cause for f in find_causes(status(process.pid))} <= {"cores", "small calls"}
        )
        seen = status(process.pid)
        assert headline(seen, []).startswith("all 2 ranks are well: ")
        assert seen.ranks[0].calls_per_s > 0
        assert seen.ranks[0].heap_bytes >= 4000


def test_a_report_says_why_a_call_failed(job, tmp_path):
    """What the others waited for stands first, then that they gave up."""
    trace = tmp_path / "trace"
    text = "if rank == 1: time.sleep(300)\ncomm.barrier(timeout=6)"
    with job(2, text, "--trace", str(trace)) as process:
        process.communicate(timeout=60)
    assert process.returncode
    above = report.above(analyse(merge(trace)))
    assert re.match(
        r"rank 1 sleeps in its own code .* after all_reduce.*; rank 0 has waited [\d.]+ s for it "
        r"in barrier at program.py:12",
        above[0],
    )
    assert any(line.startswith("also: a call failed at program.py:12") for line in above)


def rank(number, state="waits", waits=None, **more):
    """Return a rank as `status` would."""
    usual = dict(
        pid=100 + number,
        call="barrier",
        site="a.py:1 f()",
        calls=3,
        inside=waits is not None,
        step=None,
        calls_per_s=0.0,
        busy=0.0,
        ready=0.0,
        faults_per_s=0.0,
        heap_bytes=0,
        rss_bytes=1 << 30,
        swap_bytes=0,
        cores=2,
        why="",
    )
    return RankStatus(number, state=state, waits=waits, **usual | more)


def seen(*ranks, failure=None):
    return Status(1, "program", 0.2, list(ranks), [], failure)


def test_what_cannot_be_staged_everywhere():
    """Swap, which this machine may not have, dead ranks, and a failure in the memory."""
    wait = Wait(1, 9.0, "in barrier at a.py:1 f()")
    for more, want in (
        ({"state": "blocked", "swap_bytes": 3 << 30}, "rank 1 is swapped out (process 101: 3,072"),
        ({"state": "blocked"}, "rank 1 is blocked in the kernel (process 101"),
        ({"state": "gone"}, "rank 1 is dead (process 101) after barrier at a.py:1 f()"),
        ({"state": "left", "why": "OSError: disk"}, "rank 1 has left (process 101) after"),
        ({"state": "in a call", "inside": True}, "rank 1 works inside barrier at a.py:1 f()"),
        ({"state": "absent", "call": ""}, "rank 1 has not joined the job; rank 0 has waited 9 s"),
    ):
        found = find_causes(seen(rank(0, waits=wait), rank(1, **more)))
        assert found[0].text.startswith(want)
    failure = {"culprit": 1, "kind": "PeerLost", "text": "", "cause": 2, "reporter": 0}
    found = find_causes(seen(rank(0), rank(1, "gone"), failure=failure))
    assert found[0].text.startswith("rank 1 has ended the communicator (PeerLost)")


def test_many_ranks_have_a_page(monkeypatch):
    wait = Wait(63, 2.0, "in barrier")
    ranks = [rank(r, waits=wait) for r in range(63)] + [rank(63, "sleeps")]
    above, rows, below = lines(seen(*ranks))
    assert above[0].startswith("rank 63 sleeps in its own code")
    assert rows[0][0] == "63"
    assert (len(rows), below) == (32, ["and 32 more ranks"])
    assert causes.find_causes(seen(*ranks))[0].ranks == [63]

"""Traces of real jobs: complete, on one clock, and in a form that Perfetto opens."""

import gc
import gzip
import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, PeerLost
from pycoll.observe.causes import STARVED
from pycoll.observe.report import text
from pycoll.observe.report.advice import advise, headline
from pycoll.observe.report.analysis import analyse
from pycoll.observe.report.page import render
from pycoll.observe.trace import chrome
from pycoll.observe.trace.files import PACKED, RECORD, unpack
from pycoll.observe.trace.merged import merge
from pycoll.runtime.selection.tuning_table import Time, Tuning, World
from pycoll.schedule.cost.cost import Machine
from pycoll.testing import run_processes, run_threads

PHASES = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
"""What the Trace Event Format wants of each kind of event."""


def work(comm, folder, calls=40, late=1, pause=0.002):
    x, y = comm.zeros(256), np.ones(3000)
    comm.all_reduce(x)  # not traced
    for _ in range(2):  # nor this; the second has become quick
        if comm.rank == 0:
            comm.send(y, 1)
        if comm.rank == 1:
            comm.recv(y, 0)
    with comm.trace(folder):
        for i in range(calls):
            if comm.rank == late and i % 2:
                time.sleep(pause)
            comm.all_reduce(x, out=x)
            comm.broadcast(y)
        comm.all_reduce(x, async_op=True).wait()
        if comm.rank == 0:
            comm.send(y, 1, tag=5)
        if comm.rank == 1:
            comm.recv(y, 0, tag=5)
        counts = comm.stats().collectives
    comm.all_reduce(x)  # not traced
    return {name: (c.calls, c.nbytes, sum(c.histogram)) for name, c in counts.items()}


def test_every_call_is_there(tmp_path):
    counts = run_processes(3, work, tmp_path)
    assert counts == 3 * [{"all_reduce": (41, 41 * 1024, 41), "broadcast": (40, 40 * 24000, 40)}]
    trace = merge(tmp_path)
    (group,) = trace.groups
    assert group.enter_ns.shape == (3, 81)
    assert not np.isnan(group.enter_ns).any()
    assert (group.leave_ns >= np.max(group.enter_ns, axis=0) - trace.clock_error_ns).all()
    assert trace.clock_error_ns <= 5000
    assert (group.waited_ns <= group.leave_ns - group.enter_ns + 1000).all()
    assert {site.rpartition(" ")[2] for site in group.site} == {"work()"}
    assert [len(s.messages) for s in sorted(trace.streams, key=lambda s: s.rank)] == [1, 1, 0]
    assert (tmp_path / f"{next(tmp_path.glob('*.calls')).name}").stat().st_size == 81 * 38
    assert (RECORD.itemsize, PACKED.itemsize) == (40, 38)


def test_records_are_unpacked():
    packed = np.zeros(3, PACKED)
    for i, name in enumerate(PACKED.names):
        packed[name] = [i, 7 * i + 1, 250 * i]
    packed["count_low"], packed["count_high"] = [1, 3, 2**32 - 1], [0, 2**8, 2**16 - 1]
    packed["enter_ns"] = 2**64 - 1
    calls = unpack(packed)
    assert calls["count"].tolist() == [1, 2**40 + 3, 2**48 - 1]
    for name in set(RECORD.names) - {"count"}:
        assert (calls[name] == packed[name]).all()


def test_communicators_split_from_a_traced_one_are_traced(tmp_path):
    """Those that were there before, and those that are made meanwhile; by one thread for all."""

    def rank(comm):
        before, x = comm.dup(), np.ones(2)
        inner = before.dup()
        with comm.trace(tmp_path):
            after = comm.dup()
            for part in (comm, before, inner, after):
                for _ in range(3):
                    part.all_reduce(x)
            writers = sum(t.name == "pycoll trace" for t in threading.enumerate())
            counted = [
                part.stats().collectives["all_reduce"].calls
                for part in (comm, before, inner, after)
            ]
        for part in (comm, before, inner, after):
            part.all_reduce(x)
        left = [part.stats().collectives for part in (comm, before, inner, after)]
        writers_left = sum(t.name == "pycoll trace" for t in threading.enumerate())
        return counted, writers, left, writers_left

    for counted, writers, left, writers_left in run_processes(2, rank):
        assert counted == [3, 3, 3, 3]
        assert (writers, writers_left) == (1, 0)
        assert left == [{}, {}, {}, {}]
    sizes = sorted(group.enter_ns.shape[1] for group in merge(tmp_path).groups)
    assert sizes == [3, 3, 3, 3 + 3]  # dup itself makes three


def test_traces_of_several_threads_begin_and_end(tmp_path):
    """While others do, and while a garbage collection closes communicators that are traced."""

    def rank(comm):
        def work(part):
            x = np.ones(2)
            for _ in range(40):
                with part.trace(tmp_path):
                    part.all_reduce(x)

        threads = [threading.Thread(target=work, args=(comm.dup(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        with comm.trace(tmp_path):
            for _ in range(20):
                part = comm.dup()
                part.own = part  # a circle
                part.all_reduce(np.ones(2))
                del part
                gc.collect()
        return sum(t.name == "pycoll trace" for t in threading.enumerate())

    assert run_processes(2, rank, timeout=120) == [0, 0]


def test_many_quick_calls_are_all_written(tmp_path):
    """More than the ring holds, with nothing in between."""

    def rank(comm):
        x = comm.zeros(1)
        with comm.trace(tmp_path):
            for _ in range(200_000):
                comm.all_reduce(x, out=x)
        return comm.rank

    run_processes(2, rank)
    trace = merge(tmp_path)
    assert [stream.lost for stream in trace.streams] == [0, 0]
    assert [stream.calls.size for stream in trace.streams] == [200_000, 200_000]
    assert (np.diff(trace.streams[0].calls["enter_ns"].astype(np.int64)) > 0).all()


def test_the_late_rank_is_named(tmp_path):
    run_processes(3, work, tmp_path, 60, 2, 0.01)
    seen = analyse(merge(tmp_path))
    found = advise(seen)
    assert headline(seen, found).startswith("rank 2 enters ")
    assert found[0].ranks == [2]
    starved = seen.ranks[2].ready > STARVED  # other programs may have the cores
    assert ("no core" if starved else "more to do between calls than the mean") in found[0].text
    assert seen.ranks[2].last >= 25
    shown = text.tables(seen)
    assert [row[0] for row in shown["Ranks"][1]] == ["0", "1", "2"]
    page = render(seen, seen)
    assert page.count("<svg") == 1
    assert "rank 2 enters" in page
    assert "http" not in page  # nothing is loaded
    assert text.changes(seen, seen)[1][0][3] == "+0%"


def test_uneven_samples_are_named(tmp_path):
    def rank(comm):
        x, samples = comm.zeros(8), 30 if comm.rank == 1 else 5
        with comm.trace(tmp_path):
            for _ in range(20):
                time.sleep(samples * 0.0005)
                comm.all_reduce(x, out=x)
                comm.note_step(samples)

    run_processes(3, rank)
    seen = analyse(merge(tmp_path))
    line = headline(seen, advise(seen))
    assert line.startswith("rank 1 enters ")
    assert "of the calls last, for it has 30 samples a step where the mean is 13.33; " in line
    head, rows = text.tables(seen)["Steps"]
    assert head == ("rank", "steps", "median", "in calls", "samples", "overlap")
    assert [(row[0], row[1], row[4], row[5]) for row in rows] == [
        ("0", "20", "5", ""),
        ("1", "20", "30", ""),
        ("2", "20", "5", ""),
    ]
    assert seen.ranks[0].step_share > 0.5 > seen.ranks[1].step_share  # rank 0 waits for rank 1
    assert 0.015 <= seen.ranks[0].step_s < 0.1


def test_overlap_is_told(tmp_path):
    """What a program did not wait for, of the time in calls, was hidden behind work."""

    def rank(comm):
        x = comm.zeros(8)
        with comm.trace(tmp_path):
            for _ in range(11):
                time.sleep(0.02 * (comm.rank == 2))
                start = time.perf_counter()
                comm.all_reduce(x, out=x)
                waited_s = time.perf_counter() - start
                comm.note_step(1, waited_s / 4 if comm.rank == 1 else waited_s)

    run_processes(3, rank)
    seen = analyse(merge(tmp_path))
    assert seen.ranks[0].overlap < 0.1
    assert 0.55 < seen.ranks[1].overlap < 0.8  # 0.75, less on a busy machine
    assert text.tables(seen)["Steps"][1][1][5] == f"{seen.ranks[1].overlap:.0%}"


def test_what_was_tuned_stands_beside(tmp_path):
    def rank(comm):
        x = np.ones(256)
        times = [
            Time("all_reduce", 3000, symmetric, name, "", 5e-6, 0, 0)
            for symmetric in (False, True)
            for name in ("one_shot", "recursive_doubling")
        ]
        world = World(*comm._session.place, Machine(), tuple(times), ())
        comm._session.use(Tuning({}, (world,)), None)
        with comm.trace(tmp_path):
            comm.all_reduce(x, algorithm="one_shot")
            comm.all_reduce(np.ones(100), algorithm="one_shot")  # too far from what was measured

    run_threads(2, rank)
    rows = {row[2]: row[7] for row in text.tables(analyse(merge(tmp_path)))["Collectives"][1]}
    assert rows == {"2 KiB": "5 us", "800 B": ""}


def test_times_are_those_of_the_clock(tmp_path):
    """Ticks of the processor become time: each call begins between two readings of the clock."""

    def rank(comm):
        x, around = comm.zeros(8), []
        with comm.trace(tmp_path):
            for i in range(300):
                before = time.monotonic_ns()
                comm.all_reduce(x, out=x)
                around.append((before, time.monotonic_ns()))
                time.sleep(0.001 * (i % 50 == 0))  # the trace is moved to disk meanwhile
        return around

    around = np.array(run_processes(2, rank))
    for stream in merge(tmp_path).streams:
        calls = stream.calls
        before, after = around[stream.rank].T
        enter = calls["enter_ns"].astype(np.int64)
        assert (enter >= before - 5000).all()
        assert (enter + calls["total_ns"] <= after + 5000).all()


def test_small_calls_and_growing_memory_are_named(tmp_path):
    def rank(comm):
        x, kept = comm.zeros(8), []
        with comm.trace(tmp_path):
            until = time.monotonic() + 2.6
            while True:
                for _ in range(50):
                    comm.all_reduce(x, out=x)
                kept.append(np.ones(400_000) if comm.rank == 1 else None)
                if comm.all_reduce(np.array([time.monotonic() > until]), "max")[0]:
                    break
                time.sleep(0.01)

    run_processes(2, rank)
    causes = {f.cause: f for f in advise(analyse(merge(tmp_path)))}
    assert causes["memory"].ranks == [1]
    assert causes["memory"].text.startswith("the memory of rank 1 grows by ")
    assert "calls of at most 16 KiB at test_record.py" in causes["small calls"].text


def test_who_died_inside_a_call_is_not_said_to_have_stayed_away(tmp_path):
    """A trace has a call once it is over: it cannot tell the two."""

    def rank(comm):
        with comm.trace(tmp_path):
            comm.barrier()
            if comm.rank == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if comm.rank == 0:
                time.sleep(0.6)
            with pytest.raises(PeerLost):
                comm.barrier()

    run_processes(3, rank, may_die=[1])
    line = next(f.text for f in advise(analyse(merge(tmp_path))) if f.cause == "failed")
    assert line.endswith("; rank 1 never entered it, or died before its end")


def test_events_are_what_the_format_wants(tmp_path):
    run_processes(2, work, tmp_path, 20, 1, 0.01)
    trace = merge(tmp_path)
    path = tmp_path / chrome.FILE
    chrome.write(trace, path)
    value = json.loads(gzip.decompress(path.read_bytes()))
    assert value["otherData"]["clock_error_us"] <= 5
    events = value["traceEvents"]
    for event in events:
        assert set(event) - PHASES[event["ph"]] - {"ph", "tid"} == set()
        assert PHASES[event["ph"]] - {"tid"} <= set(event)
        assert event.get("dur", 0) >= 0
    calls = [e for e in events if e["ph"] == "X" and e["cat"] == "call"]
    assert len(calls) == 2 * 41
    assert calls[0]["args"]["algorithm"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(type(key) is int for key in starts)  # Perfetto draws no arrow with another id
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [named[tid] for tid in sorted(named)] == ["rank 0", "rank 1"]
    late = [e for e in starts.values() if named[e["tid"]] == "rank 1"]
    assert len(late) >= 8  # from rank 1, which came last, to rank 0
    for key, start in starts.items():  # an arrow lies in slices of both ranks
        for event in (start, ends[key]):
            assert any(
                c["tid"] == event["tid"]
                and c["ts"] <= event["ts"] + 0.002 <= c["ts"] + c["dur"] + 0.01
                for c in calls
            )
    assert [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "message"] == [
        "send",
        "recv",
    ]


def test_a_trace_is_refused(tmp_path):
    def rank(comm):
        with comm.trace(tmp_path), pytest.raises(ArgumentError, match="are traced already"):
            with comm.trace(tmp_path):
                pass
        (tmp_path / "file").touch()
        with pytest.raises(ArgumentError, match="cannot write a trace to"):
            with comm.trace(tmp_path / "file" / "below"):
                pass
        assert comm.stats().collectives == {}

    run_threads(1, rank)
    with pytest.raises(ArgumentError, match="holds no trace"):
        merge(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="has no calls"):
        merge(tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        path.write_text('{"pycoll_trace": 77}\n')
    with pytest.raises(ArgumentError, match="its format is 77"):
        merge(tmp_path)

"""Calls on a device in traces, and as ranges of NVTX, where a device does everything at once."""

import gzip
import json
import time

import numpy as np
import pytest

from cuda import host_streams
from cuda.host_cupy import DeviceArray, Stream
from pycoll.config import Config
from pycoll.cuda.calls import times
from pycoll.errors import CudaUnavailable
from pycoll.observe.report import text
from pycoll.observe.report.analysis import analyse
from pycoll.observe.trace import chrome
from pycoll.observe.trace.merged import merge
from pycoll.testing import RankFailed, run_threads

CONFIG = Config(timeout_s=20, heap_bytes=1 << 28, device_heap_bytes=1 << 20)


def calls(comm, folder):
    """Make calls on a device in a trace; return the host's clock before and after each."""
    x, around = DeviceArray(np.full(1000, comm.rank + 1.0, np.float32)), []
    comm.all_reduce(x)  # not traced
    with comm.trace(folder):
        for i in range(5):
            before = time.monotonic_ns()
            comm.all_reduce(x, out=x, stream=Stream(3 if i == 2 else 0))
            around.append((before, time.monotonic_ns()))
        comm.all_gather(x, async_op=True).wait()
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            comm.recv(x, 0)
    comm.all_reduce(x)  # not traced
    return around


def test_times_lie_on_the_clock_of_the_host(host_kernels, tmp_path):
    around = run_threads(2, calls, tmp_path, config=CONFIG)
    trace = merge(tmp_path)
    assert 0 < trace.device_error_ns < 50_000
    for stream in trace.streams:
        names = [row[0] for row in stream.device]
        assert names[:6] == 5 * ["all_reduce float32[1000]"] + ["all_gather float32[2000]"]
        assert names[6:] == [["send 4000 B"], ["receive 4000 B"]][stream.rank]
        assert [row[3] for row in stream.device] == 5 * [4000] + [8000, 4000]
        assert [row[4] for row in stream.device[:6]] == [0, 0, 3, 0, 0, 77]
        for (before, after), row in zip(around[stream.rank], stream.device, strict=False):
            _, begin, total, *_, launched, error = row
            assert before <= launched <= begin + error
            assert begin + total <= after + error
            assert total > 0


def test_traces_and_reports_have_them(host_kernels, tmp_path):
    run_threads(2, calls, tmp_path, config=CONFIG)
    trace = merge(tmp_path)
    chrome.write(trace, tmp_path / chrome.FILE)
    value = json.loads(gzip.decompress((tmp_path / chrome.FILE).read_bytes()))
    assert value["otherData"]["device_clock_error_us"] == trace.device_error_ns / 1e3
    found = [e for e in value["traceEvents"] if e.get("cat") == "device"]
    assert len(found) == 14
    threads = {
        e["tid"]: e["args"]["name"] for e in value["traceEvents"] if e["name"] == "thread_name"
    }
    assert {threads[e["tid"]] for e in found} == {
        f"rank {rank}, device stream {handle:#x}" for rank in (0, 1) for handle in (0, 3, 77)
    }
    assert len(threads) == len(set(threads.values())) == 8
    seen = analyse(trace)
    head, rows = text.tables(seen)["On devices"]
    assert head[0] == "on a device"
    assert sorted(row[:3] for row in rows)[1] == ["all_reduce float32[1000]", "3.91 KiB", "10"]
    assert any(line.startswith("times on devices are those of") for line in text.above(seen))


def test_what_is_captured_has_no_times(host_kernels, tmp_path):
    """Events would be a part of the graph, and never happen."""

    def rank(comm):
        x, stream = DeviceArray(np.ones(10, np.float32)), Stream(0)
        comm.all_reduce(x, out=x)
        with comm.trace(tmp_path):
            stream.begin_capture()
            comm.all_reduce(x, out=x, stream=stream)
            stream.end_capture()
            comm.all_reduce(x, out=x)

    run_threads(1, rank, config=CONFIG)
    assert [len(stream.device) for stream in merge(tmp_path).streams] == [1]


def test_clocks_of_other_speed(monkeypatch, host_kernels, tmp_path):
    """A device whose clock is wrong by 0.1% and began elsewhere: anchors put it right."""
    monkeypatch.setattr(
        host_streams.Event,
        "record",
        lambda self, stream=None: setattr(self, "when", time.monotonic() * 1.001 - 1e5),
    )
    monkeypatch.setattr(times, "_EVERY_S", 0.05)

    def rank(comm):
        x, around = DeviceArray(np.ones(1000, np.float32)), []
        with comm.trace(tmp_path):
            for _ in range(30):
                before = time.monotonic_ns()
                comm.all_reduce(x, out=x)
                around.append((before, time.monotonic_ns()))
                time.sleep(0.01)
        return around

    around = run_threads(1, rank, config=CONFIG)[0]
    (stream,) = merge(tmp_path).streams
    assert len(stream.device) == 30
    for (before, after), (_, begin, total, *_, error) in zip(around, stream.device, strict=True):
        assert before - error <= begin
        assert begin + total <= after + error


def test_a_busy_device_costs_times_not_calls(monkeypatch, host_kernels, tmp_path):
    """Where no anchor can be had, calls run as ever, and the trace has none of their times."""

    def record(self, stream=None):
        self.done, self.when = stream is None or stream.ptr != 77, time.perf_counter()

    monkeypatch.setattr(host_streams.Event, "record", record)
    monkeypatch.setattr(times, "_PATIENCE_NS", 1000)

    def rank(comm):
        x = DeviceArray(np.full(10, comm.rank, np.float32))
        with comm.trace(tmp_path):
            return comm.all_reduce(x, stream=Stream(0)).get().tolist()

    assert run_threads(2, rank, config=CONFIG) == 2 * [10 * [1.0]]
    assert [stream.device for stream in merge(tmp_path).streams] == [[], []]


def test_every_call_is_a_range(host_kernels, tmp_path):
    """Of arrays on a device, and of those on the host, whose fast path knows no Python."""
    host_kernels.ranges()

    def rank(comm):
        x, y = DeviceArray(np.ones(10, np.float32)), np.ones(3)
        for _ in range(2):
            comm.all_reduce(y, out=y)
        with comm.trace(tmp_path):
            comm.broadcast(y)
        comm.all_reduce(x, out=x)
        comm.scatter(y)

    run_threads(1, rank, config=Config(**{**vars(CONFIG), "nvtx": True}))
    said = host_kernels.ranges()
    assert said.count("end") * 2 == len(said)
    own = "end", "all_gather", "barrier"  # devices are connected by the latter
    named = [line for line in said if not line.startswith(own)]
    assert named == [
        *2 * ["all_reduce 3"],
        "broadcast 3",
        "all_reduce float32[10]",
        "scatter 3",
    ]
    run_threads(1, rank, config=CONFIG)
    assert host_kernels.ranges() == []


def test_without_a_library_there_are_no_ranges(monkeypatch, host_kernels):
    def no_library():
        raise CudaUnavailable("pycoll was built without its device library")

    monkeypatch.setattr("pycoll.cuda.device.ranges.library", no_library)
    with pytest.raises(RankFailed, match="CudaUnavailable: pycoll was built without"):
        run_threads(1, lambda comm: None, config=Config(nvtx=True, heap_bytes=1 << 20))

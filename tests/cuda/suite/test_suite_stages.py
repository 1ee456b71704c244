"""The stages of the suite for a device, over kernels compiled for the host."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cuda.memory_wire import Binding, at
from pycoll.config import Config
from pycoll.cuda import missing
from pycoll.cuda.transports import nccl
from pycoll.testing import run_threads

GPU = Path(__file__).resolve().parents[3] / "benchmarks/gpu"


@pytest.fixture
def stage(gpu, host_kernels, monkeypatch, tmp_path):
    """Run a stage over kernels compiled for the host; return what it wrote."""
    monkeypatch.setenv("PYCOLL_GPU_ROWS", str(tmp_path / "rows.jsonl"))
    rows, common = gpu("rows"), gpu("common")
    monkeypatch.setattr(common, "missing", list)

    def run(name, *args, **settings):
        monkeypatch.setenv("PYCOLL_GPU_STAGE", name)
        module = gpu(name)
        for key, value in settings.items():
            monkeypatch.setattr(module, key, value)
        if hasattr(module, "library"):
            monkeypatch.setattr(module, "library", lambda: host_kernels)
        module.main(*args)
        return rows.read(tmp_path / "rows.jsonl")

    return run


def test_the_stage_that_compares_bits(stage):
    written = stage("correct", "--few", WORLDS=(2,), BLOCK=350)
    assert len(written) > 35
    assert [row for row in written if not row["ok"]] == []


def test_the_stages_of_what_is_newest(stage, monkeypatch):
    """Floats of 8 bits; copies and sums in packets, and messages: virtual ranks."""
    written = stage("correct", "--float8", WORLDS=(2,), BLOCK=350, LARGE=2003)
    names = {(row["dtype"], row["algorithm"]) for row in written}
    assert {("float8_e4m3fn", "all_reduce/ring"), ("float8_e5m2", "reduce/direct")} <= names
    written = stage("correct", "--packets", WORLDS=(2, 3), SMALL=(7, 77), LARGE=2003)[
        len(written) :
    ]
    kernels = {row["algorithm"]: row["kernel"] for row in written if row["algorithm"] != "sendrecv"}
    assert {"all_gather/direct_push", "all_to_all/direct", "broadcast/push_pull"} <= set(kernels)
    assert {"low_latency", "interpret"} <= {row.get("kernel", "").split(" ")[0] for row in written}
    assert [row["algorithm"] for row in written].count("sendrecv") == 2 * 3
    assert [row for row in written if not row["ok"]] == []


def test_large_vectors_are_compared_too(stage):
    written = stage("correct", WORLDS=(), LARGE=2003)
    assert {(row["n"], row["dtype"], row["count"]) for row in written} == {(8, "float32", 2003)}
    assert {row["algorithm"] for row in written} >= {"all_reduce/ring", "all_reduce/two_shot_push"}
    assert [row for row in written if not row["ok"]] == []


def test_the_stage_of_assumptions(stage):
    """Those that host code can try, and one that fails: the others go on."""
    checks = ("special_values", "missing", "unaligned")
    few = {"ALGORITHMS": ("one_shot", "ring"), "OPS": ("sum", "avg")}  # sums are built for hosts
    written = stage("assumptions", CHECKS=checks, **few)
    assert [row["what"] for row in written if not row["ok"]] == ["missing"], written
    assert len(written) >= 2 * 2 * 2 + 1 + 3 * 3


def test_the_stage_of_optimizer_steps(stage, gpu, tmp_path):
    """Its times mean nothing here; the report takes them all the same."""
    written = stage("steps", MIB=1 << 10, SPEED_MIB=16, SIZES=(1, 300))
    checked = [row for row in written if row["name"] == "steps"]
    assert len(checked) == 3 * 3 * 3 + 4
    assert [row for row in checked if not row["ok"]] == []
    passes = [row for row in written if row["name"] == "pass"]
    assert len(passes) == 3 * 3 + 3 * 3
    sizes = {row["kernel"]: row["nbytes"] // (4 << 10) for row in passes}
    assert sizes["adamw float32"] == sizes["adamw bfloat16"] == 28
    assert sizes["unscale float16"] == 6
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| steps | optimizer steps and checks, the same bits as on the CPU | 31 | 0 |" in text
    assert "| adamw bfloat16 | 0 MiB |" in text


def test_the_stage_of_graphs(stage):
    written = stage("graphs", REPLAYS=2)
    assert len(written) == 12
    assert [row for row in written if not row["ok"]] == []


def test_the_stage_of_rows_that_are_normalised(stage, gpu, tmp_path):
    """With all_reduce alone for what CuPy's kernels would do behind it."""

    def unfused(cupy, ranks, x, weight, more, out, kept):
        return lambda stream: ranks.all_reduce(x, out=out, stream=stream)

    sizes = {"WORLDS": (2, 3), "SHAPES": ((2, 64), (3, 45)), "HIDDEN": 64, "TOKENS": (1, 3)}
    written = stage("norm", **sizes, MIB=1 << 10, unfused=unfused)
    checked = [row for row in written if row["name"] in ("norm bits", "graph")]
    assert len(checked) == 2 * (3 * 2 * 4 + 1)
    assert [row for row in checked if not row["ok"]] == []
    timed = [row for row in written if row["name"] == "norm"]
    assert [row["way"] for row in timed] == ["unfused", "one_shot", "two_shot_push"] * 4
    assert gpu("norm").traffic("two_shot_push", 8, 10) == (8 + 1 + 16) * 10
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert (
        "| norm | all_reduce + residual + RMSNorm, the same bits as on the CPU | 48 | 0 |" in text
    )
    assert "| two_shot_push | 3 | 3 |" in text


def test_the_stage_of_faults(stage):
    written = stage("faults", ALGORITHMS=("ring", "one_shot"))
    assert len(written) == (1 + 2) * (2 + 3 + 3) + 3  # one_shot by both protocols
    assert [row for row in written if not row["ok"]] == []
    absent = [row for row in written if row["name"] == "absent"]
    assert all(row["named"] and max(row["waited_ns"]) >= 50_000_000 for row in absent)


def test_training_finds_array_functions_in_other_packages(gpu, monkeypatch):
    gpu("rows"), gpu("common")
    training = gpu("training")
    pytest.importorskip(training.COPIES[0], reason="scikit-learn with a copy is not installed")
    monkeypatch.setitem(sys.modules, "array_api_compat", None)  # as if it were not installed
    assert training.find_array_api() == training.COPIES[0]
    from array_api_compat import array_namespace

    assert array_namespace(np.ones(3)).__name__.startswith(training.COPIES[0])
    for name in training.COPIES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    assert training.find_array_api() is None


def test_the_stage_of_training(gpu, host_kernels, tmp_path):
    """With threads for processes."""
    gpu("rows"), gpu("common")
    training, writer = gpu("training"), gpu("rows").Writer(tmp_path / "rows.jsonl", "train2")
    config = Config(timeout_s=20, heap_bytes=1 << 28, device_heap_bytes=1 << 20)
    run_threads(2, lambda comm: training.compare(comm, writer, 1), config=config)
    (row,) = gpu("rows").read(tmp_path / "rows.jsonl")
    assert row["ok"]
    assert len(row["seconds"]) == training.STEPS


def test_the_stage_of_processes(stage, gpu, host_kernels, monkeypatch, tmp_path):
    """With threads for processes."""
    gpu("rows"), gpu("common")
    ranks, writer = gpu("ranks"), gpu("rows").Writer(tmp_path / "rows.jsonl", "ipc2")
    monkeypatch.setattr(ranks, "library", lambda: host_kernels)
    ranks.SIZES, ranks.MESSAGES = (17, 40000), (68, 70_004)
    cupy = sys.modules["cupy"]

    def rank(comm):
        ranks.first_calls(comm, cupy, writer, "cuda")
        ranks.bits(comm, cupy, writer)
        ranks.heap_memory(comm, writer)
        ranks.moves(comm, cupy, writer)
        ranks.ragged(comm, cupy, writer)
        ranks.messages(comm, cupy, writer)
        ranks.small(comm, cupy, writer)

    config = Config(timeout_s=20, heap_bytes=1 << 28, device_copy_bytes=64 << 10)
    run_threads(2, rank, config=config)
    first, *written = gpu("rows").read(tmp_path / "rows.jsonl")
    assert len(first["seconds"]) == 2
    assert len(written) == 2 * 2 * len(ranks.ALGORITHMS) + 6 + 4 + 9
    assert written[-19]["virtual"]
    assert [row for row in written if not row["ok"]] == []
    gpu("report").write(tmp_path)
    assert "| message, symmetric memory | 2 |" in (tmp_path / "report.md").read_text()


def test_the_stage_of_traces(stage, gpu, host_kernels, monkeypatch, tmp_path):
    """With threads for processes, and the ranges of the host library for a profiler."""
    gpu("rows"), gpu("common")
    traced, writer = gpu("traced"), gpu("rows").Writer(tmp_path / "rows.jsonl", "traced2")
    monkeypatch.setattr(traced, "SIZES", (17, 3000))
    cupy = sys.modules["cupy"]

    def rank(comm):
        comm.all_reduce(cupy.ones(17, cupy.float32))
        traced.times(comm, cupy, writer, tmp_path)
        traced.ranges(comm, cupy, writer, None)

    run_threads(2, rank, config=Config(timeout_s=20, heap_bytes=1 << 28))
    *written, heard = gpu("rows").read(tmp_path / "rows.jsonl")
    assert [(row["count"], row["ok"], row["timed"]) for row in written] == [
        (17, True, 20),
        (3000, True, 20),
    ]
    assert all(0 < row["error_us"] <= 50 for row in written)
    assert heard["ok"] is None


class Pair(Binding):
    """Two ranks that add up float32."""

    def native(self, kind, pointers, count, code, more, stream):
        source, target = pointers
        with self.group():
            self.send(source, 4 * count, 1 - self.rank, stream)
            self.recv(target, 4 * count, 1 - self.rank, stream)
        at(target, count, np.float32)[:] += at(source, count, np.float32)


@pytest.mark.parametrize("sockets", [False, True])
def test_messages_of_nccl_are_timed_unless_by_sockets(
    gpu, host_kernels, monkeypatch, tmp_path, sockets
):
    gpu("rows"), gpu("common")
    ranks, writer = gpu("ranks"), gpu("rows").Writer(tmp_path / "rows.jsonl", "nccl2")
    monkeypatch.setattr(nccl, "find_binding", lambda: Pair)
    monkeypatch.setattr(nccl, "environment", dict)
    monkeypatch.setattr(ranks, "MIB", 1 << 10)
    monkeypatch.setattr(
        ranks, "seconds_in_graphs", ranks.median_seconds
    )  # it has no barrier inside
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    if sockets:
        monkeypatch.setenv("NCCL_HOSTID", "a")
    config = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")
    run_threads(
        2, lambda comm: ranks.times(comm, sys.modules["cupy"], writer, "nccl"), config=config
    )
    written = gpu("rows").read(tmp_path / "rows.jsonl")
    assert [row["algorithm"] for row in written] == ["native", "ring", "two_shot_pull"] * 3
    assert all(row["ok"] and (row["seconds"] is None) == sockets for row in written)
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    for how, times in {"works: ranks on": 9 * sockets, "by events": 6 - 6 * sockets}.items():
        assert text.count(f"| {how}") == times


def test_the_stage_that_measures(stage, gpu, tmp_path):
    """Its figures mean nothing here; the report takes them all the same."""
    sizes = {"PROTOCOL_BYTES": (8, 512, 512 << 10), "PROTOCOL_THREADS": (32, 64)}
    written = stage("speed", MIB=1 << 10, WORLDS=(2,), **sizes)
    assert {row["name"] for row in written} >= {"all_reduce", "small all_reduce", "cupy sum"}
    large = [row for row in written if row["name"] == "all_reduce"]
    assert all(row["right"] for row in large)
    judged = {(row["algorithm"], row["nbytes"] >> 10) for row in large if row["bar"]}
    names = ("two_shot_push", "two_shot_push_rank", "ring", "halving_doubling")
    assert judged == {(name, size) for name in names for size in (64, 256)}
    assert all(row["right"] for row in written if row["name"] == "small all_reduce")
    both = [row for row in written if row["name"] == "protocol"]
    assert all(row["right"] for row in both)
    assert Counter(row["kernel"].split()[0] for row in both) == {
        "low_latency": 4,
        "one_shot": 2,
        "two_shot": 1,
    }
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| ring | 2 |" in text
    assert "| ranks | bytes | direct | packets, 32 threads a block | packets, 64" in text
    assert "| two_shot_push, 256 threads a block | 2 |" in text


def test_the_stage_of_moves(stage, gpu, tmp_path):
    written = stage("moves", MIB=1 << 10, WORLDS=(2, 4), SIZES=(4,), SMALL_BYTES=(8, 40))
    small = [row for row in written if row["name"] == "small move"]
    assert len(small) == 2 * 3 * 2
    assert all(row["right"] and row["packets"] for row in small)
    written = [row for row in written if row not in small]
    assert len(written) == 2 * 6
    assert all(row["ok"] for row in written)
    assert [row["made_by"] for row in written].count("copies") == 4
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| all_gather/direct_pull, copies | 4 | 0.00390625 MiB |" in text
    assert "| all_to_all | 4 | 40 |" in text


@pytest.mark.skipif(not missing(), reason="there is a device")
@pytest.mark.parametrize("name", ["facts", "speed"])
def test_without_a_device_a_stage_says_so(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_GPU_ROWS", str(tmp_path / "rows.jsonl"))
    done = subprocess.run(
        [sys.executable, GPU / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert "skipped: CUDA kernels: " in done.stderr or "skipped: CUDA device: " in done.stderr
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["name"] == "skipped"
    assert row["ok"] is None

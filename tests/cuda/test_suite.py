"""The suite for a device: its own parts, tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuda.memory_wire import Binding, at
from pycoll.config import Config
from pycoll.cuda import missing, nccl
from pycoll.testing import run_threads

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks/gpu"


def record(writer, stage):
    """Write the rows that stages write, with figures made up for this test."""
    suite, bits, speed = (writer(name) for name in ("suite", "correct", stage))
    suite.row("begin", date="2030-01-02T03:04:05+00:00")
    facts = {"multiprocessors": 132, "driver": 13000, "runtime": 13010, "cupy": "14", "python": "3"}
    suite.row("device", device="a device", pycoll="0", commit="abc", **facts)
    for rank in range(3):
        bits.row("bits", rank != 1, n=2, dtype="float32", algorithm=f"all_reduce/{rank}")
    for name, share, ok in (("two_shot_push", 0.9, True), ("ring", 0.5, False)):
        speed.row(
            *("all_reduce", ok),
            **{"n": 2, "nbytes": 64 << 20, "algorithm": name, "seconds": 1e-3, "bar": 0.85},
            **{"of_own_traffic": share, "of_least_traffic": share / 2, "registers": 30},
            **{"spilled": 0, "right": True},
        )
    times = {"seconds": 7e-6, "empty_seconds": 3e-6, "bar": 1e-5, "host_seconds": 2e-5}
    speed.row("small all_reduce", True, n=8, nbytes=8192, kernel="one_shot f32 sum", **times)
    speed.row("cudaMemcpyAsync", n=2, nbytes=1 << 28, seconds=1e-3, tb_s=4.2)
    speed.row("cupy sum", n=2, nbytes=1 << 28, seconds=2e-3, share=0.4)
    suite.row("speed", True, status="done", seconds=12.5)
    suite.row("ipc2", False, status="killed: too slow", seconds=60.0)


def test_a_report_of_what_the_writer_wrote(gpu, tmp_path):
    rows, report = gpu("rows"), gpu("report")
    path = tmp_path / "rows.jsonl"
    record(lambda stage: rows.Writer(path, stage), "speed")
    with path.open("a") as file:
        file.write('{"stage": "speed", "name": "cut off in the mid')
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    for line in (
        "would take at 4.20 TB/s",
        "a device, 132 multiprocessors, driver for CUDA 13.0, runtime 13.1",
        "| ipc2 | killed: too slow | 60.0 |",
        "| correct | the same bits as the engine on the CPU | 2 | 1 |",
        "| two_shot_push | 2 | 64 MiB | 1000 us | 90% | 45% | 85% | yes | 30 |",
        "| ring | 2 | 64 MiB | 1000 us | 50% | 25% | 85% | **no** | 30 |",
        "| 8 ranks, one_shot f32 sum | 7.0 us | 3.0 us | 10.0 us | yes | 20.0 us |",
        "| cudaMemcpyAsync | 2 | 256 MiB | 1000 us | 4.20 TB/s |",
    ):
        assert line in text
    assert len(json.loads((tmp_path / "results.json").read_text())) == 12
    assert (tmp_path / "traffic.png").read_bytes()[:4] == b"\x89PNG"


def test_a_part_of_the_report_that_fails_costs_only_itself(gpu, tmp_path, monkeypatch):
    rows, report, suite = gpu("rows"), gpu("report"), gpu("suite")
    path = tmp_path / "rows.jsonl"
    record(lambda stage: rows.Writer(path, stage), "speed")
    rows.Writer(path, "speed").row("small all_reduce", True, n=2)  # and no more

    def draw(rows, path):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(report, "draw", draw)
    why = ["small: KeyError: 'seconds'", "draw: ZeroDivisionError: by zero"]
    assert report.write(tmp_path) == why
    text = (tmp_path / "report.md").read_text()
    assert all(f"`{line}`" in text for line in why)
    assert "| ring | 2 | 64 MiB |" in text
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["error"] for row in saved if row["name"] == "report"] == why
    stages = [(name, [sys.executable, "-c", ""], 20.0) for name in ("one", "two")]
    monkeypatch.setattr(suite, "stages", lambda python: stages)
    monkeypatch.setattr(suite.report, "write", lambda folder: why)
    monkeypatch.setenv("PYCOLL_GPU_ROWS", "")
    monkeypatch.setenv("PYCOLL_GPU_STAGE", "")
    assert suite.run(tmp_path, None, 60.0) == ["report"]
    assert [row["name"] for row in rows.read(path)] == ["begin", "one", "two"]


def test_a_stage_that_hangs_or_fails_costs_only_itself(gpu, tmp_path, monkeypatch):
    suite = gpu("suite")
    write = (
        f"import sys; sys.path.insert(0, {str(GPU)!r}); from rows import Writer; import os, time;"
    )
    write += "Writer(os.environ['PYCOLL_GPU_ROWS'], 'correct').row('bits', True);"
    commands = [
        ("hangs", [sys.executable, "-c", f"{write} time.sleep(60)"], 1.5),
        ("fails", [sys.executable, "-c", f"{write} sys.exit(3)"], 20.0),
        ("missing", ["/no/such/program"], 20.0),
        ("works", [sys.executable, "-c", write], 20.0),
    ]
    monkeypatch.setattr(suite, "stages", lambda python: commands)
    monkeypatch.setenv("PYCOLL_GPU_ROWS", "")
    monkeypatch.setenv("PYCOLL_GPU_STAGE", "")
    assert suite.run(tmp_path, None, 60.0) == ["hangs", "fails", "missing"]
    text = (tmp_path / "report.md").read_text()
    assert "| correct | the same bits as the engine on the CPU | 3 | 0 |" in text
    ends = {"hangs": "killed: too slow", "fails": "exit status 3", "works": "done"}
    assert all(f"| {name} | {how} |" in text for name, how in ends.items())
    assert suite.run(tmp_path, ["works"], 0.0) == ["works"]
    assert "| works | not run |" in (tmp_path / "report.md").read_text()


def test_arguments(gpu, capsys):
    suite = gpu("suite")
    with pytest.raises(SystemExit):
        suite.main(["--stage", "nothing"])
    assert "known: build, facts, correct" in capsys.readouterr().err
    limits = [limit for _, _, limit in suite.stages("python")]
    assert suite.LIMIT_S <= 9 * 60 - 15
    assert max(limits) < suite.LIMIT_S / 2


@pytest.mark.parametrize(
    ("setuptools", "pybind11", "old"), [("84.2", "3.1", False), ("76.1", "3.1", True)]
)
def test_tools_that_cannot_read_pyproject_are_replaced(tmp_path, setuptools, pybind11, old):
    """With an interpreter that notes how it is called, and modules that have only a version."""
    for name, version in (("setuptools", setuptools), ("pybind11", pybind11)):
        (tmp_path / f"{name}.py").write_text(f"__version__ = '{version}.0'\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$1" = - ] && exec {sys.executable} -\necho "$PYTHONPATH $*"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", GPU / "run.sh", tmp_path / "results", "--stage", "facts"],
        env={**os.environ, "PYTHON": str(python), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *installs, last = done.stdout.splitlines()
    assert [" -m pip install " in line for line in installs] == [True] * old
    path, _, command = last.partition(" ")
    assert path.split(":") == [str(ROOT / "build/tools")] * old + [str(ROOT), str(tmp_path)]
    assert command == f"benchmarks/gpu/suite.py {tmp_path / 'results'} --stage facts"


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
    written = stage("correct", True, WORLDS=(2,), BLOCK=350)
    assert len(written) > 35
    assert [row for row in written if not row["ok"]] == []


def test_the_stage_of_optimizer_steps(stage, gpu, tmp_path):
    """Its times mean nothing here; the report takes them all the same."""
    written = stage("steps", MIB=1 << 10, SIZES=(1, 300))
    checked = [row for row in written if row["name"] == "steps"]
    assert len(checked) == 3 * 3 * 3 + 4
    assert [row for row in checked if not row["ok"]] == []
    passes = [row for row in written if row["name"] == "pass"]
    assert len(passes) == 3 * 3 + 3 * 3
    sizes = {row["kernel"]: row["nbytes"] // (64 << 10) for row in passes}
    assert sizes["adamw float32"] == sizes["adamw bfloat16"] == 28
    assert sizes["unscale float16"] == 6
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| steps | optimizer steps and checks, the same bits as on the CPU | 31 | 0 |" in text
    assert "| adamw bfloat16 | 1 MiB |" in text


def test_the_stage_of_graphs(stage):
    written = stage("graphs", REPLAYS=2)
    assert len(written) == 8
    assert [row for row in written if not row["ok"]] == []


def test_the_stage_of_faults(stage):
    written = stage("faults", ALGORITHMS=("ring", "one_shot"))
    assert len(written) == 2 * (2 + 3 + 3) + 3
    assert [row for row in written if not row["ok"]] == []
    assert all(row["named"] for row in written if row["name"] == "absent")


def test_the_stage_of_processes(stage, gpu, host_kernels, tmp_path):
    """With threads for processes."""
    gpu("rows"), gpu("common")
    ranks, writer = gpu("ranks"), gpu("rows").Writer(tmp_path / "rows.jsonl", "ipc2")
    ranks.SIZES = (17, 40000)
    cupy = sys.modules["cupy"]
    run_threads(2, lambda comm: ranks.bits(comm, cupy, writer))
    written = gpu("rows").read(tmp_path / "rows.jsonl")
    assert len(written) == 2 * 2 * len(ranks.ALGORITHMS)
    assert [row for row in written if not row["ok"]] == []


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
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    if sockets:
        monkeypatch.setenv("NCCL_HOSTID", "a")
    config = Config(timeout_s=10, heap_bytes=1 << 28, device_transport="nccl")
    run_threads(2, lambda comm: ranks.native(comm, sys.modules["cupy"], writer), config=config)
    written = gpu("rows").read(tmp_path / "rows.jsonl")
    assert [row["algorithm"] for row in written] == ["native", "ring", "two_shot_pull"] * 2
    assert all(row["ok"] and (row["seconds"] is None) == sockets for row in written)
    gpu("report").write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    how = "works: ranks on one device, through sockets" if sockets else "by events, of 5 calls"
    assert text.count(f"| {how}") == len(written)


def test_the_stage_that_measures(stage, gpu, tmp_path):
    """Its figures mean nothing here; the report takes them all the same."""
    written = stage("speed", MIB=1 << 10, WORLDS=(2,))
    assert {row["name"] for row in written} >= {"all_reduce", "small all_reduce", "cupy sum"}
    large = [row for row in written if row["name"] == "all_reduce"]
    assert all(row["right"] for row in large)
    judged = {(row["algorithm"], row["nbytes"] >> 10) for row in large if row["bar"]}
    rings = {(name, 256) for name in ("ring", "halving_doubling")}
    assert judged == {("two_shot_push", 64), ("two_shot_push", 256), *rings}
    gpu("report").write(tmp_path)
    assert "| ring | 2 |" in (tmp_path / "report.md").read_text()


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

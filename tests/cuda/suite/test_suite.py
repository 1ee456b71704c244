"""The suite for a device: its own parts, tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
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
            **{"predicted": 8e-4},
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
        "| two_shot_push | 2 | 64 MiB | 1000 us | 1.25 | 90% | 45% | 85% | yes | 30 |",
        "| ring | 2 | 64 MiB | 1000 us | 1.25 | 50% | 25% | 85% | **no** | 30 |",
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
    again = (tmp_path / "report.md").read_text()
    assert "| works | not run |" in again
    assert text.split("\n\n")[2] in again, "what an earlier run has found is kept"
    (tmp_path / "more").mkdir()
    gpu("report").write(tmp_path / "more", [tmp_path])
    assert (tmp_path / "more/report.md").read_text() == again
    assert suite.run(tmp_path, None, 60.0, ["hangs", "fails", "missing"]) == []
    assert suite.run(tmp_path, None, 0.0) == ["hangs", "fails", "missing", "works"]
    assert "| done |" not in (tmp_path / "report.md").read_text(), "a whole run begins anew"


@pytest.mark.parametrize("there", [False, True])
def test_a_build_that_fails_ends_a_run_where_no_libraries_are(gpu, tmp_path, monkeypatch, there):
    suite = gpu("suite")
    stages = [("build", ["/no/such/program"], 9.0), ("two", [sys.executable, "-c", ""], 20.0)]
    monkeypatch.setattr(suite, "stages", lambda python: stages)
    monkeypatch.setattr(suite, "usable", lambda: there)
    monkeypatch.setenv("PYCOLL_GPU_ROWS", "")
    monkeypatch.setenv("PYCOLL_GPU_STAGE", "")
    assert suite.run(tmp_path, None, 60.0) == ["build"]
    text = (tmp_path / "report.md").read_text()
    assert ("| two | done |" in text) == there
    assert ("| build | libraries built before are used instead |" in text) == there


def test_without_a_device_nothing_more_is_tried(gpu, tmp_path, monkeypatch, capsys):
    suite = gpu("suite")
    text = "import sys; print('skipped: CUDA device: there is none', file=sys.stderr); sys.exit(77)"
    skips = [sys.executable, "-c", text]
    stages = [(name, skips, 9.0) for name in ("speed", "facts", "steps")]
    monkeypatch.setattr(suite, "stages", lambda python: stages)
    monkeypatch.setenv("PYCOLL_GPU_ROWS", "")
    monkeypatch.setenv("PYCOLL_GPU_STAGE", "")
    assert suite.run(tmp_path, None, 60.0) == ["facts"]
    assert capsys.readouterr().out.count("CUDA device: there is none\n") == 2
    ran = [row["name"] for row in gpu("rows").read(tmp_path / "rows.jsonl")]
    assert ran == ["begin", "speed", "facts"]
    assert "| facts | skipped | " in (tmp_path / "report.md").read_text()


def test_libraries_that_are_there_can_be_used(gpu):
    assert gpu("suite").usable() == (ROOT / "pycoll/libpycoll_cuda.so").exists()


def test_a_stage_that_hangs_tells_where(gpu, tmp_path):
    suite, log = gpu("suite"), tmp_path / "stages.log"
    text = f"import sys, time; sys.path.insert(0, {str(GPU)!r}); import common; "
    text += "common.missing = lambda: time.sleep(60); common.open_stage()"
    assert suite.run_stage([sys.executable, "-c", text], 4.0, log) is None
    assert "in open_stage" in log.read_text()


def test_what_there_is_to_build_with(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLL_GPU_ROWS", str(tmp_path / "rows.jsonl"))
    tools = gpu("tools")
    tools.main()
    found = {row["what"]: row["found"] for row in gpu("rows").read(tmp_path / "rows.jsonl")}
    assert found["python"].startswith(sys.version)
    assert found["Python.h"].endswith(("exists", "is missing"))
    assert np.__version__ in found["numpy"]
    gpu("report").write(tmp_path)
    assert "| compute policy | " in (tmp_path / "report.md").read_text()


def test_arguments(gpu, capsys):
    suite = gpu("suite")
    with pytest.raises(SystemExit):
        suite.main(["--stage", "nothing"])
    assert "known: tools, build, facts, float8, packets" in capsys.readouterr().err
    names = [name for name, _, _ in suite.stages("python")]
    in_parts = sorted(name for part, _ in suite.PARTS.values() for name in part)
    assert in_parts == sorted([*names, "facts"]), (
        "each is in one part; a device is looked for in both"
    )
    limits = [limit for _, _, limit in suite.stages("python")]
    assert suite.LIMIT_S <= 9 * 60 - 15
    assert max(limits) < suite.LIMIT_S / 2


def test_a_part_ends_with_its_tables(gpu, tmp_path, monkeypatch, capsys):
    suite = gpu("suite")
    names = [name for name, _, _ in suite.stages("python")]
    stages = [(name, [sys.executable, "-c", ""], 9.0) for name in names]
    monkeypatch.setattr(suite, "stages", lambda python: stages)
    monkeypatch.setattr(suite, "usable", lambda: True)
    monkeypatch.setenv("PYCOLL_GPU_ROWS", "")
    monkeypatch.setenv("PYCOLL_GPU_STAGE", "")
    for part in ("smoke", "measure"):
        folder = tmp_path / part
        assert suite.main([str(folder), "--part", part]) == 0
        ran = [row["name"] for row in gpu("rows").read(folder / "rows.jsonl")][1:]
        assert sorted(ran) == sorted(set(suite.PARTS[part][0]) - {"build"})
        assert f"| {ran[-1]} | done |" in capsys.readouterr().out.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("setuptools", "missing", "installed"),
    [
        ("84.2", "", []),
        ("76.1", "", ["pybind11 setuptools"]),
        ("84.2", "array_api_compat", ["array-api-compat"]),
        ("84.2", "ml_dtypes", ["--no-deps ml_dtypes"]),
    ],
)
def test_packages_that_are_missing_or_old_are_installed(tmp_path, setuptools, missing, installed):
    """With an interpreter that notes how it is called, and modules that have only a version."""
    for name, version in (("setuptools", setuptools), ("pybind11", "3.1")):
        (tmp_path / f"{name}.py").write_text(f"__version__ = '{version}.0'\n")
    for name in ("array_api_compat", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text("raise ImportError" if name == missing else "")
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
    assert [line.partition(" --find-links wheels ")[2] for line in installs] == installed
    path, _, command = last.partition(" ")
    assert path.split(":") == [str(ROOT / "build/tools")] * len(installed) + [
        str(ROOT),
        str(tmp_path),
    ]
    assert command == f"benchmarks/gpu/suite.py {tmp_path / 'results'} --stage facts"


@pytest.mark.parametrize("starts", [True, False])
def test_a_daemon_for_processes_side_by_side_is_ended(tmp_path, starts):
    """With a daemon and an interpreter that note how they are called."""
    calls = tmp_path / "calls"
    daemon = tmp_path / "nvidia-cuda-mps-control"
    daemon.write_text(
        f'#!/bin/bash\n[ "$1" = -d ] && echo start >>{calls} && exit {int(not starts)}\n'
        f"cat >>{calls}; touch $CUDA_MPS_LOG_DIRECTORY/control.log\n"
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$1" = - ] && exit 0\n'
        f'echo "$CUDA_DEVICE_MAX_CONNECTIONS $LD_PRELOAD ${{@:3}}" >>{calls}; exit 3\n'
    )
    for program in (daemon, python):
        program.chmod(0o755)
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}
    done = subprocess.run(
        ["bash", GPU / "mps.sh", tmp_path / "results", "--stage", "nccl4"],
        env={**os.environ, **more, "PYCOLL_NCCL": "libc.so.6"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = calls.read_text().splitlines()
    if starts:
        assert said == ["start", "8 libc.so.6 --stage nccl4", "quit"]
        assert done.returncode == 3
    else:
        assert said == ["start"]
        assert done.returncode == 1
        assert "the MPS daemon did not start" in done.stderr


def test_without_a_daemon_the_script_says_so(tmp_path):
    done = subprocess.run(
        ["/bin/bash", GPU / "mps.sh", tmp_path],
        env={"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "nvidia-cuda-mps-control is missing: it comes with the driver" in done.stderr

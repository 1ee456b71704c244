"""Device code on threads under the thread sanitizer."""

import os
import subprocess
import sys

import pytest

from device_library import ROOT, host_library


def under_sanitizer(*arguments):
    """Run tests/cuda/races.py with the sanitizer's run-time library in front of all others."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("this compiler has no thread sanitizer")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}:{ROOT / 'tests'}",
        "LD_PRELOAD": runtime,
        "TSAN_OPTIONS": "report_bugs=1 exitcode=66 ignore_noninstrumented_modules=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = ["setarch", "-R", sys.executable, str(ROOT / "tests/cuda/races.py")]
    command += [str(host_library("tsan")), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_no_races():
    done = under_sanitizer()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout


def test_a_missing_wait_is_a_race():
    done = under_sanitizer("broken")
    assert done.returncode == 66, done.stdout + done.stderr
    assert "data race" in done.stderr

"""Ranges of NVTX as a profiler gets them, by NVTX's own protocol; no device is needed."""

import os
import shutil
import subprocess
import sys

import pytest

from cuda.device.test_machine import headers
from device_library import ROOT

PROGRAM = """
import ctypes, sys
import numpy as np
from pathlib import Path
from pycoll.config import Config
from pycoll.cuda.device import ranges
from pycoll.testing import run_threads
ranges.library = lambda: type("L", (), {"path": Path(sys.argv[1])})
made = ranges.Ranges()
made.begin("outside")
def rank(comm):
    x, y = np.ones(7), comm.zeros(3)
    for _ in range(2):
        comm.all_reduce(x, out=x)
    comm.all_gather(y)
    comm.all_reduce(y, async_op=True).wait()
run_threads(1, rank, config=Config(nvtx=True, heap_bytes=1 << 20))
made.end()
"""


def compiled(source, made, *options):
    """Compile a library over CUDA's headers."""
    words = ["g++", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{headers()}"]
    words += [f"-I{ROOT / 'csrc'}", *options, source, "-o", made, "-ldl"]
    subprocess.run(words, check=True, timeout=120)
    return made


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_a_profiler_hears_of_every_call(tmp_path):
    ranges = compiled(ROOT / "csrc/cuda/host/ranges.cu", tmp_path / "ranges.so", "-xc++")
    tool = compiled(ROOT / "tests/support/nvtx_tool.cpp", tmp_path / "tool.so")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NVTX_TOOL_OUT": str(tmp_path / "said")}
    words = [sys.executable, "-c", PROGRAM, ranges]
    subprocess.run(words, check=True, timeout=60, env=env | {"NVTX_INJECTION64_PATH": str(tool)})
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [
        "pycoll 0",
        "outside 0",
        *2 * ["all_reduce 7", "end 0"],
        "all_gather 3",
        "end 0",
        "all_reduce 3",
        "end 0",
        "end 0",
    ]
    (tmp_path / "said").unlink()
    subprocess.run(words, check=True, timeout=60, env=env)  # no profiler: nobody hears
    assert not (tmp_path / "said").exists()

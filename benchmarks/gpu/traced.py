"""Processes that share the device, in a trace: times of the device on the host's clock, and ranges.

Started by ``pycoll run``, with PYCOLL_NVTX=1 for the ranges. A stream is empty before and after
each call, so the host's clock bounds what the trace says of it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import MIB, ROOT, open_stage, row_of_all

import build_cuda
import pycoll
from pycoll.observe.trace.files import read

CALLS = 20
SIZES = (17, MIB, 16 * MIB)  # elements
MOST_ERROR_US = 50


def times(comm, cupy, writer, folder):
    """Check that every call lies where the host has seen it, and how exactly; a row for each size.

    Also the time of a call with a trace, and without one.
    """
    for size in SIZES:
        x, around = cupy.ones(size, cupy.float32), []
        plain = [called(comm, cupy, x) for _ in range(CALLS)]
        with comm.trace(folder / str(size)):
            around += [called(comm, cupy, x) for _ in range(CALLS)]
        comm.barrier()
        (own,) = (s for s in read(folder / str(size)) if s.rank == comm.rank)
        inside = [
            before <= begin + error and begin + total <= after + error
            for (before, after), (_, begin, total, *_, error) in zip(
                around, own.device, strict=False
            )
        ]
        errors = [row[-1] / 1e3 for row in own.device]
        good = len(inside) == CALLS and all(inside) and max(errors) <= MOST_ERROR_US
        facts = {"count": size, "timed": len(inside), "inside": sum(inside)}
        facts["error_us"] = round(max(errors, default=0), 3)
        for name, taken in (("seconds", plain), ("traced_seconds", around)):
            facts[name] = round(float(np.median(np.diff(taken))) * 1e-9, 9)
        facts["device_seconds"] = round(float(np.median([r[2] for r in own.device])) * 1e-9, 9)
        row_of_all(comm, writer, "traced", good, **facts)


def called(comm, cupy, x):
    """Make a call, and return the host's clock before it and when it has ended."""
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    before = time.monotonic_ns()
    comm.all_reduce(x, out=x)
    stream.synchronize()
    return before, time.monotonic_ns()


def profiler(folder):
    """Make a profiler of the tests that NVTX finds, and return where it writes to, or None."""
    nvcc, said = build_cuda.find_nvcc(), folder / "said"
    source, made = ROOT / "tests/support/nvtx_tool.cpp", folder / "tool.so"
    words = [nvcc, "-std=c++20", "-shared", "-Xcompiler", "-fPIC", source, "-o", made]
    if nvcc is None or subprocess.run(words, check=False).returncode:
        return None
    os.environ |= {"NVTX_INJECTION64_PATH": str(made), "NVTX_TOOL_OUT": str(said)}
    return said


def ranges(comm, cupy, writer, said):
    """Check that a profiler hears of calls on the device and on the host; a row."""
    if said is None:
        row_of_all(comm, writer, "ranges", None, why="nvcc has made no profiler")
        return
    before = said.read_text().splitlines() if said.exists() else []
    called(comm, cupy, cupy.ones(5, cupy.float32))
    comm.broadcast(np.ones(3))
    heard = said.read_text().splitlines()[len(before) :]
    good = "all_reduce float32[5] 0" in heard and "broadcast 3" in heard
    good = good and 2 * heard.count("end 0") == len(heard)
    row_of_all(comm, writer, "ranges", good, heard=heard)


def main():
    writer, cupy = open_stage()
    with tempfile.TemporaryDirectory() as own:
        said = profiler(Path(own))  # before NVTX is used
        with pycoll.init() as comm:
            comm.all_reduce(cupy.ones(17, cupy.float32))  # opens the transport
            name = comm.broadcast_object(own)
            times(comm, cupy, writer, Path(name))
            ranges(comm, cupy, writer, said)
            comm.barrier()


if __name__ == "__main__":
    sys.exit(main())

"""What machine.cu asks of CUDA, over a runtime of the tests that notes it."""

import subprocess
from pathlib import Path

import pytest

import build_cuda
from device_library import ROOT

SOURCE = ROOT / "tests/cuda/machine_calls.cpp"


def headers():
    """Return the folder with CUDA's headers, or skip."""
    nvcc = build_cuda.find_nvcc()
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for home in (*homes, Path("/usr/local/cuda")):
        if (home / "include/cuda_runtime.h").exists():
            return home / "include"
    return pytest.skip("there are no headers of CUDA")


def test_devices_are_chosen_only_where_needed(tmp_path):
    """A device that is current is left alone; an export has a context whatever was before."""
    made = tmp_path / "machine_calls"
    options = ["-std=c++20", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{headers()}"]
    unused = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]  # the rest of CUDA
    subprocess.run(["g++", *options, SOURCE, "-o", made, *unused], check=True, timeout=120)
    done = subprocess.run([made], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.splitlines() == [
        "idle here: idle 0",
        "idle there: set 1 idle 1 set 0",
        "idle nowhere: set 2 ArgumentError",
        "export: set 0 export 0, offset 24 of 76",
        "export: set 1 set 1 export 1 set 0, offset 24 of 76",
    ]

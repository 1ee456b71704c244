"""What the files that call CUDA ask of it, over a CUDA of the tests that notes it."""

import subprocess
from pathlib import Path

import pytest

import build_cuda
from device_library import ROOT


def headers():
    """Return the folder with CUDA's headers, or skip."""
    nvcc = build_cuda.find_nvcc()
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for home in (*homes, Path("/usr/local/cuda")):
        if (home / "include/cuda_runtime.h").exists():
            return home / "include"
    return pytest.skip("there are no headers of CUDA")


def said(source, folder):
    """Compile a program over a CUDA of the tests; return the lines that it prints."""
    made = folder / "program"
    options = ["-std=c++20", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{headers()}"]
    unused = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]  # the rest of CUDA
    file = ROOT / "tests/cuda" / source
    subprocess.run(["g++", *options, file, "-o", made, *unused], check=True, timeout=120)
    done = subprocess.run([made], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.splitlines()


def test_devices_are_chosen_only_where_needed(tmp_path):
    """A device that is current is left alone; an export has a context whatever was before.

    Every kernel is loaded before ranks can wait for each other.
    """
    assert said("machine_calls.cpp", tmp_path) == [
        "idle here: idle 0",
        "idle there: set 1 idle 1 set 0",
        "idle nowhere: set 2 ArgumentError",
        "preload: " + " ".join(map(str, range(1, 18))),
        "preload with multicast: set 1 " + " ".join(map(str, range(1, 22))) + " set 0",
        "export: set 0 export 0, offset 24 of 76",
        "export: set 1 set 1 export 1 set 0, offset 24 of 76",
    ]


def test_virtual_memory_is_given_back_whatever_fails(tmp_path):
    """Each line has the calls of the driver, how it ended (!), and what is there then (+)."""
    assert said("virtual_memory_calls.cpp", tmp_path) == [
        "an old driver: 0",
        "nothing: 0",
        "create: !CudaUnavailable",
        "everything: 7",
        "create: granularity create:2000+fabric reserve map access:1 clear release"
        " +addresses +mapping",
        "create, no fabric: granularity create:2000+fabric create:2000 reserve map"
        " access:1 clear release +addresses +mapping",
        "create without create: granularity create:2000 !CudaError",
        "create without reserve: granularity create:2000 reserve release !CudaError",
        "create without map: granularity create:2000 reserve map free release !CudaError",
        "create without access: granularity create:2000 reserve map access:1 unmap free"
        " release !CudaError",
        "create without clear: granularity create:2000 reserve map access:1 clear unmap"
        " free release !CudaError",
        "export: retain fabric export release 33 and fabric",
        "export without retain: retain !CudaError",
        "export without fabric: retain fabric export release 33",
        "export without export: retain fabric export release !CudaError",
        "open: import:33 reserve map access:1 release +addresses +mapping",
        "open without import: import:33 !CudaError",
        "open without reserve: import:33 reserve release !CudaError",
        "open without map: import:33 reserve map free release !CudaError",
        "open without access: import:33 reserve map access:1 unmap free release !CudaError",
        "open nothing: !ArgumentError",
        "open by fabric: import:fabric reserve map access:1 release +addresses +mapping",
        "create and close: granularity create:2000 reserve map access:1 clear release | unmap free",
        "a team of odd size: unit:2 !ArgumentError",
        "a team: unit:2 create export add:1 retain bind:1000 reserve map access:1"
        " release | unmap free unbind release",
        "a team without create: unit:2 create ! |",
        "a team without export: unit:2 create export release ! |",
        "a team without add: unit:2 create export add:1 ! | release",
        "a team without retain: unit:2 create export add:1 retain ! | release",
        "a team without bind: unit:2 create export add:1 retain bind:1000 release ! | release",
        "a team without map: unit:2 create export add:1 retain bind:1000 reserve map"
        " free unbind release ! | release",
        "in a team: import:5 | release",
        "in a team without import: import:5 ! |",
    ]

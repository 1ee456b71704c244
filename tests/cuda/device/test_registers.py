"""nvcc compiles every kernel, for every architecture, without spilling registers."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import build_cuda
import ptxas_table
from ptxas_table import ROOT

TABLE = json.loads((ROOT / "tests/cuda/registers.json").read_text(encoding="utf-8"))
ARCHITECTURES = [target for target in build_cuda.TARGETS if target.startswith("sm_")]
LATER = [target for target in ARCHITECTURES if target != "sm_80"]
NVCC = build_cuda.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the newest build said, or, if there was none, a fresh compilation of one source."""
    logs = ptxas_table.logs()
    if logs:
        return logs
    folder, before = tmp_path_factory.mktemp("kernels"), Path.cwd()
    command = build_cuda.compile_command(
        NVCC, "csrc/cuda/kernels/units/kernels_bits.cu", str(folder / "bits.o"), ARCHITECTURES
    )
    os.chdir(ROOT)
    try:
        build_cuda.run(command)
    finally:
        os.chdir(before)
    return ptxas_table.parse((folder / "bits.o.log").read_text(encoding="utf-8"))


def test_the_table_is_complete():
    kernels = TABLE["kernels"]
    assert {"interpret float sum", "direct float sum", "fold float sum", "interpret move"} <= set(
        kernels
    )
    assert {"step adamw float BFloat NoCopy", "squares double"} <= set(kernels)
    found = Counter(name.split()[0] for name in kernels)
    folds = {"interpret": 49, "fold": 49, "direct": 6, "multicast": 3, "low_latency": 6}
    folds |= {"empty": 1, "gate": 1, "message": 1, "moves": 1, "norm": 3, "multicast_copies": 1}
    assert found == {**folds, "step": 40, "unscale": 4, "nonfinite": 4, "squares": 4}
    for name, rows in kernels.items():
        targets = LATER if name.startswith("multicast") else ARCHITECTURES
        assert sorted(rows) == sorted(targets), name
        assert all(spilled == 0 and registers <= 128 for registers, spilled in rows.values()), name


@needs_nvcc
def test_nothing_spills_and_no_kernel_has_grown(found):
    same = tuple(TABLE["nvcc"]) == build_cuda.release(NVCC)
    for name, rows in found.items():
        for architecture, (registers, spilled) in rows.items():
            assert spilled == 0, f"{name} on {architecture} spills {spilled} bytes"
            limit = TABLE["kernels"][name][architecture][0] if same else 128
            assert registers <= limit, f"{name} on {architecture}: {registers} > {limit} registers"


def test_spills_are_seen():
    text = """ptxas info    : Compiling entry function '_Z5emptyv' for 'sm_90'
ptxas info    : Function properties for _Z5emptyv
    16 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers"""
    assert ptxas_table.parse(text) == {"empty": {"sm_90": [128, 72]}}

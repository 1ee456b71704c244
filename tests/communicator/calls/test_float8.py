"""Floats of 8 bits: every pair, what overflows, and arrays that NumPy shows as bytes."""

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from pycoll.errors import ArgumentError, MismatchError
from pycoll.testing import run_threads

CODES = np.arange(256, dtype=np.uint8)
LEFT, RIGHT = np.repeat(CODES, 256), np.tile(CODES, 256)
KINDS = [*cases.REDUCING, *cases.MOVING]


@pytest.mark.parametrize("name", oracle.FLOATS8)
def test_all_pairs_have_the_bits_of_ml_dtypes(run, name):
    """The sum in float32, converted once, as ml_dtypes does it; there is one NaN."""
    parts = [codes.view(oracle.dtype(name)) for codes in (LEFT, RIGHT)]
    wants = {op: oracle.reduce(parts, op) for op in oracle.ARITHMETIC}
    for want in wants.values():
        want.view(np.uint8)[np.isnan(want)] = oracle.NAN8[name]

    def rank(comm):
        return {op: comm.all_reduce(parts[comm.rank], op).tobytes() for op in wants}

    assert run(2, rank) == [{op: want.tobytes() for op, want in wants.items()}] * 2


@pytest.mark.parametrize("name", oracle.FLOATS8)
def test_all_collectives(name):
    """On one to four ranks; tests of all types try memories and operations."""
    for n in (1, 2, 3, 4):
        todo = [cases.make(kind, name, n, 33) for kind in KINDS]
        cases.check(("threads", n), todo)


def test_what_is_too_large_becomes_infinite_or_nan(run):
    big = {"float8_e4m3fn": 448, "float8_e5m2": 57344}

    def rank(comm):
        found = {}
        for name, most in big.items():
            x = np.array([most, -most, most], oracle.dtype(name))
            x[2] = most / 32 if comm.rank else most  # less than half a place
            found[name] = comm.all_reduce(x).astype(np.float32)
        return found

    for found in run(2, rank):
        assert np.isnan(found["float8_e4m3fn"][:2]).all()
        assert found["float8_e4m3fn"][2] == 448
        assert found["float8_e5m2"].tolist() == [np.inf, -np.inf, 57344]


def test_a_sum_is_rounded_once(run):
    """16 + 3 * 0.75 = 18.25, where ranks that round at every step would give 16."""

    def rank(comm):
        x = np.full(70, 16 if comm.rank == 0 else 0.75, ml_dtypes.float8_e4m3fn)
        return comm.all_reduce(x, order="rank").astype(float).tolist()

    assert run(4, rank) == [[18.0] * 70] * 4


def test_neutral_elements_of_tensors():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def rank(comm):
        found = []
        for name in oracle.FLOATS8:
            x = torch.ones(3).to(getattr(torch, name))
            for op in ("sum", "prod", "min", "max"):
                found.append(comm.exscan(x, op).float().tolist()[0])
        return found

    ends = [0.0, 1.0, 448.0, -448.0, 0.0, 1.0, float("inf"), -float("inf")]
    assert run_threads(2, rank) == [ends, [1.0] * 8]


def test_what_is_refused(run):
    """Bitwise operations, and types that differ between ranks although their sizes do not."""

    def rank(comm):
        x = np.ones(5, ml_dtypes.float8_e5m2)
        with pytest.raises(ArgumentError, match="for integers and bool; x is float8_e5m2"):
            comm.all_reduce(x, "xor")
        other = np.ones(5, ml_dtypes.float8_e4m3fn)
        with pytest.raises(MismatchError, match="float8_e4m3fn"):
            comm.all_reduce(other if comm.rank else x)
        return True

    assert run(2, rank) == [True] * 2

"""The bindings of NCCL, as far as they go without a device: found, loaded, able to make keys."""

import sys
import types

import pytest

from pycoll.cuda import missing
from pycoll.cuda.transports.nccl_bindings import (
    BINDINGS,
    UNIQUE_ID_BYTES,
    Cupy,
    Nccl4py,
    find_binding,
    native_arguments,
)
from pycoll.errors import ArgumentError, CudaUnavailable
from pycoll.types import DType, Kind, ReduceOp


@pytest.fixture(params=BINDINGS, ids=lambda b: b.__name__)
def binding(request):
    try:
        request.param.version()
    except CudaUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    return request.param


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_makes_keys(binding):
    keys = {binding.unique_id() for _ in range(3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {UNIQUE_ID_BYTES}
    assert {type(key) for key in keys} == {bytes}
    assert binding.version() >= 21800


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_its_functions_are_those_that_are_called(binding):
    """Names of functions are looked up when they are called: here before a device is needed."""
    if binding is Nccl4py:
        raw = pytest.importorskip("nccl.bindings.nccl")
        called = [*Nccl4py._NATIVE.values(), "send", "recv", "group_start", "group_end", "Comm"]
        called += ["comm_get_async_error", "get_error_string", "get_version"]
        core = pytest.importorskip("nccl.core")
        assert all(hasattr(core.Communicator, n) for n in ("init", "abort", "destroy", "ptr"))
        assert core.UniqueId.from_bytes(binding.unique_id()).as_bytes
    else:
        nccl = pytest.importorskip("cupy.cuda.nccl")
        raw = nccl.NcclCommunicator
        called = [*Cupy._NATIVE.values(), "send", "recv", "check_async_error", "abort", "destroy"]
        assert callable(nccl.groupStart)
        assert callable(nccl.groupEnd)
    assert [name for name in called if not hasattr(raw, name)] == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_of_types_and_operations_are_those_of_the_library(binding):
    nccl = pytest.importorskip("cupy.cuda.nccl")
    names = {DType.INT8: "INT8", DType.UINT8: "UINT8", DType.BFLOAT16: "BFLOAT16"}
    names |= {getattr(DType, n): n for n in ("INT32", "INT64", "UINT32", "UINT64")}
    names |= {getattr(DType, n): n for n in ("FLOAT16", "FLOAT32", "FLOAT64")}
    for dtype, name in names.items():
        code, _, _ = native_arguments(Kind.ALL_REDUCE, dtype, ReduceOp.SUM, 0, dtype.itemsize)
        assert code == getattr(nccl, f"NCCL_{name}")
    for dtype, number in (DType.FLOAT8_E4M3FN, 10), (DType.FLOAT8_E5M2, 11):  # of nccl.h
        assert native_arguments(Kind.REDUCE, dtype, ReduceOp.SUM, 0, 1) == (number, 1, (0, 0))
    for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
        _, _, more = native_arguments(Kind.ALL_REDUCE, DType.INT32, op, 0, 4)
        assert more == (getattr(nccl, f"NCCL_{op.name}"),)


def test_what_moves_is_counted_in_bytes():
    assert native_arguments(Kind.BROADCAST, None, ReduceOp.SUM, 3, 16) == (0, 16, (3,))
    assert native_arguments(Kind.ALL_TO_ALL, DType.FLOAT64, ReduceOp.SUM, 0, 8) == (0, 8, ())


def test_what_nccl_cannot_reduce_is_refused():
    for dtype, op in (
        (DType.INT16, ReduceOp.SUM),
        (DType.INT32, ReduceOp.XOR),
        (None, ReduceOp.SUM),
    ):
        with pytest.raises(ArgumentError, match="NCCL has no"):
            native_arguments(Kind.ALL_REDUCE, dtype, op, 0, 2)


def test_without_a_binding_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    with pytest.raises(CudaUnavailable, match=r"(?s)nccl4py: .*cupy.cuda.nccl: .*pip install"):
        find_binding()


def test_a_binding_without_its_library_is_passed_over(monkeypatch):
    """nccl4py is imported without NCCL, and looks for it when it is first called."""

    def absent():
        raise RuntimeError('Failure finding "libnccl.so.2": No such file\nand where it looked')

    there = types.SimpleNamespace(available=True, get_version=lambda: 23203)
    monkeypatch.setitem(sys.modules, "nccl.core", types.ModuleType("nccl.core"))
    monkeypatch.setitem(
        sys.modules, "nccl.bindings.nccl", types.SimpleNamespace(get_version=absent)
    )
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", there)
    assert find_binding() is Cupy
    there.available = False
    with pytest.raises(CudaUnavailable, match=r'nccl4py: .*finds no .*"libnccl\.so\.2": No such'):
        find_binding()
    assert [line for line in missing() if line.startswith("NCCL: no binding")]

"""Devices for the tests: a real one where there is one, else one in memory for the Python side."""

import sys

import pytest

from cuda import host_cupy, host_device
from pycoll.cuda import launch, missing, nccl, opening, peers, transport, virtual


@pytest.fixture
def host_device_library(monkeypatch):
    """Put a device in memory in the place of the device library and CuPy; return the library."""
    host = host_device.HostLibrary()
    for module in (launch, nccl, opening, peers, transport, virtual):
        monkeypatch.setattr(module, "library", lambda: host)
    monkeypatch.setitem(sys.modules, "cupy", host_cupy.cupy_module())
    return host


@pytest.fixture
def device():
    """CuPy; skips where arrays on a CUDA device cannot be used."""
    lacks = missing()
    lacks = [line for line in lacks if not line.startswith("NCCL")]
    if lacks:
        pytest.skip(lacks[0])
    import cupy

    return cupy

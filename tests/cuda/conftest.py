"""Devices for the tests: the device library compiled for the host, and a real device if any."""

import subprocess
import sys
from ctypes import c_int64, c_size_t, create_string_buffer
from pathlib import Path

import pytest

from cuda import host_cupy
from pycoll.cuda import missing
from pycoll.cuda.calls import norm, prepare, side, virtual
from pycoll.cuda.device import arrays, heap, optim, ranges
from pycoll.cuda.device.library import VMM, Library
from pycoll.cuda.transports import bound_calls, maps, multicast, nccl, peers

BUILD = Path(__file__).with_name("host") / "build.sh"
GPU = BUILD.parents[3] / "benchmarks/gpu"
FORM = 2, 32  # blocks of a rank, threads of a block: few, as they are threads of this process


class HostLibrary(Library):
    """The kernels of the device library as host code; see tests/cuda/host.

    Attributes:
        launches: Stream of every launch, and its time limit in nanoseconds.
        owned: Addresses of the device memory that is allocated, or mapped as virtual memory.
    """

    def __init__(self, path):
        super().__init__(path)
        self.launches, self.owned = [], set()
        self._dll.pycoll_host_schedule(c_int64(-1))  # whatever other tests have chosen

    def pointer(self, name, *arguments):
        made = super().pointer(name, *arguments)
        if name == "malloc":
            self.owned.add(made)
        return made

    def call(self, name, *arguments):
        if name == "launch":
            call, ins, outs, _, _, *rest, stream = arguments
            arguments = call, ins, outs, *FORM, *rest, None  # no stream: it runs at once
            host_cupy.TAPE.run(super().call, name, *arguments)
            self.launches.append((stream, rest[1]))
        elif name == "rms_norm":
            group, norm, _, _, *rest, stream = arguments
            host_cupy.TAPE.run(super().call, name, group, norm, *FORM, *rest, None)
            self.launches.append((stream, rest[0]))
        elif name in ("send", "receive"):
            group, message, _, _, *rest, stream = arguments
            host_cupy.TAPE.run(super().call, name, group, message, *FORM, *rest, None)
            self.launches.append((stream, rest[0]))
        elif name == "launch_empty":
            host_cupy.TAPE.run(super().call, name, *FORM, None)
        elif name == "fold" or name.startswith("optim_"):
            host_cupy.TAPE.run(super().call, name, *arguments[:-1], None)
        else:
            super().call(name, *arguments)
            if name == "free":
                self.owned.remove(arguments[0])
            elif name in ("vmm_create", "vmm_open"):
                self.owned.add(arguments[-1]._obj.pointer)
            elif name == "vmm_close":
                self.owned.remove(arguments[0]._obj.pointer)

    def vmm(self, bits, descriptors=True, fabric=True):
        """Set what devices support, and whether memory of descriptors and of fabrics is mapped."""
        self._dll.pycoll_host_vmm(bits, int(descriptors), int(fabric))

    def ranges(self):
        """Return what ranges have begun and ended since the last call."""
        text = create_string_buffer(1 << 16)
        size = self._dll.pycoll_host_ranges(text, c_size_t(len(text)))
        assert size < len(text)
        return text.value.decode().splitlines()

    def misaligned(self):
        """Return how many accesses a device would have refused so far."""
        return self._dll.pycoll_host_misaligned()

    def copy(self, dst, src, nbytes, stream):
        super().copy(dst, src, nbytes, None)


@pytest.fixture(scope="session")
def host_library_path():
    """Compile the device library for the host."""
    done = subprocess.run(
        ["bash", BUILD, "plain"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(BUILD.parents[3], done.stdout.split()[-1])


@pytest.fixture
def host_kernels(monkeypatch, host_library_path):
    """Put that library and host memory in the place of a device and CuPy; yield the library."""
    host = HostLibrary(host_library_path)
    modules = arrays, bound_calls, heap, maps, multicast, nccl, norm, optim, peers, prepare, side
    modules += ranges, virtual
    for module in modules:
        monkeypatch.setattr(module, "library", lambda: host)
    monkeypatch.setitem(sys.modules, "cupy", host_cupy.cupy_module())
    before = host.misaligned()
    yield host
    host.vmm(VMM)
    assert host.misaligned() == before, "vectors were loaded or stored from where they do not begin"


@pytest.fixture
def gpu(monkeypatch):
    """Import a module of the suite as it imports itself."""
    monkeypatch.syspath_prepend(str(GPU))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = __import__(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


@pytest.fixture
def device():
    """CuPy; skips where arrays on a CUDA device cannot be used."""
    lacks = [line for line in missing() if not line.startswith("NCCL")]
    if lacks:
        pytest.skip(lacks[0])
    import cupy

    return cupy

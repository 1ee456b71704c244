"""The device library as Python sees it: ``libpycoll_cuda.so`` by ctypes.

``csrc/cuda/host/pycoll_cuda.h`` has the contracts of its structures and functions.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from pycoll.cuda.device.errors import unavailable
from pycoll.errors import ArgumentError, ScheduleError, TransportError

ABI = 1
MAX_RANKS = 64
_OK, _UNAVAILABLE, _ARGUMENT, _SCHEDULE, _TOO_LARGE = range(5)
NO_ERROR, TIMEOUT, ABORTED, MISMATCH, FOLLOWED = range(5)
BEST, INTERPRET = 0, 1
INSTALL = "install an NVIDIA driver that supports CUDA 13, and see that `nvidia-smi` lists a device"


class DeviceInfo(ctypes.Structure):
    """``PycollCudaDevice``."""

    _fields_ = [
        ("name", c_char * 256),
        ("uuid", c_uint8 * 16),
        ("major", c_int32),
        ("minor", c_int32),
        ("multiprocessors", c_int32),
        ("cooperative", c_int32),
        ("max_threads_per_block", c_int32),
        ("pci_domain", c_int32),
        ("pci_bus", c_int32),
        ("pci_device", c_int32),
        ("runnable", c_int32),
        ("reserved", c_int32),
        ("memory_bytes", c_uint64),
        ("l2_bytes", c_uint64),
    ]


class Ipc(ctypes.Structure):
    """``PycollCudaIpc``: memory that another process can open."""

    _fields_ = [
        ("handle", c_uint8 * 64),
        ("offset", c_uint64),
        ("nbytes", c_uint64),
        ("device", c_int32),
        ("reserved", c_int32),
    ]


class KernelError(ctypes.Structure):
    """``PycollCudaError``: what a kernel wrote before it gave up."""

    _fields_ = [
        ("kind", c_uint32),
        ("rank", c_uint32),
        ("peer", c_uint32),
        ("block", c_uint32),
        ("step", c_uint32),
        ("expected", c_uint32),
        ("seen", c_uint32),
        ("instruction", c_uint32),
        ("waited_ns", c_uint64),
        ("reserved", c_uint64),
    ]


class Spec(ctypes.Structure):
    """``PycollCudaCallSpec``: one rank's plan with numbers."""

    _fields_ = [
        ("code", c_void_p),
        ("operands", c_void_p),
        *(
            (name, c_uint32)
            for name in (
                "ninstructions noperands rank chunks slots rounds direct dtype op itemsize "
                "layout_in layout_out scale_n scale_at_exit"
            ).split()
        ),
        ("count", c_uint64),
        ("chunk", c_uint64),
        ("descriptor", c_uint64),
        ("in_offset", c_void_p),
        ("in_length", c_void_p),
        ("out_offset", c_void_p),
        ("out_length", c_void_p),
    ]


class CallInfo(ctypes.Structure):
    """``PycollCudaCallInfo``: which code runs a call."""

    _fields_ = [
        ("kernel", c_char * 64),
        ("max_blocks", c_int32),
        ("blocks", c_int32),
        ("threads", c_int32),
        ("registers", c_int32),
        ("local_bytes", c_int32),
        ("shared_bytes", c_int32),
        ("segments", c_uint64),
        ("in_bytes", c_uint64 * MAX_RANKS),
        ("out_bytes", c_uint64 * MAX_RANKS),
    ]


class Step(ctypes.Structure):
    """``PycollCudaStep``: an optimizer step."""

    _fields_ = [
        *((name, c_int32) for name in "kind state grad_type copy_type".split()),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("slots", c_void_p * 2),
        ("copy", c_void_p),
        ("count", c_uint64),
        *((name, c_double) for name in "scale keep rate beta1 beta2 root eps decay".split()),
    ]


_PP = POINTER(c_void_p)
# Arguments of every function that returns a status; the name stands behind "pycoll_cuda_".
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "device_count": (POINTER(c_int),),
    "versions": (POINTER(c_int), POINTER(c_int)),
    "device_properties": (c_int, POINTER(DeviceInfo)),
    "preload": (c_int,),
    "enable_peer_access": (c_int, c_int),
    "malloc": (c_int, c_size_t, _PP),
    "free": (c_void_p,),
    "copy": (c_void_p, c_void_p, c_size_t, c_void_p),
    "synchronize": (c_void_p,),
    "ipc_export": (c_void_p, POINTER(Ipc)),
    "ipc_open": (c_int, POINTER(Ipc), _PP, _PP),
    "ipc_close": (c_int, c_void_p),
    "fold": (c_int, c_int, c_int, c_uint32, _PP, c_int, _PP, c_int, c_uint64, c_void_p),
    "optim_step": (POINTER(Step), c_void_p),
    "optim_unscale": (c_int, c_void_p, c_void_p, c_uint64, c_double, c_void_p, c_void_p),
    "optim_nonfinite": (c_int, c_void_p, c_uint64, c_void_p, c_void_p),
    "optim_add_squares": (c_int, c_void_p, c_uint64, c_void_p, c_void_p),
    "add_limbs": (c_void_p, c_void_p),
    "group_virtual": (c_int, c_int, c_int, _PP),
    "group_peer": (c_int, c_int, c_int, c_int, c_uint64, _PP),
    "group_control": (c_void_p, _PP),
    "group_share": (c_void_p, c_int),
    "group_connect": (c_void_p, _PP, _PP, c_uint64, _PP, c_uint64),
    "group_destroy": (c_void_p,),
    "group_error": (c_void_p, c_int, POINTER(KernelError)),
    "group_failed": (c_void_p, POINTER(c_int)),
    "group_abort": (c_void_p,),
    "group_reset": (c_void_p,),
    "call_create": (c_void_p, POINTER(Spec), c_int, _PP),
    "call_destroy": (c_void_p,),
    "call_info": (c_void_p, c_int, POINTER(CallInfo)),
    "launch": (c_void_p, _PP, _PP, c_int, c_int, c_int, c_uint64, c_uint64, c_void_p),
    "launch_empty": (c_int, c_int, c_void_p),
}


class Library:
    """The functions of the device library; each raises pycoll's errors instead of returning codes.

    Attributes:
        path: Where it was loaded from.
        for_host: Its kernels are compiled for the host, as the tests of pycoll have them.
    """

    def __init__(self, path: Path) -> None:
        """Load it; needs neither driver nor device.

        Raises:
            CudaUnavailable: If the file is missing, cannot be loaded, or is of another version.
        """
        self.path = path
        if not path.exists():
            raise unavailable(
                f"pycoll was built without its device library ({path.name} is missing)",
                "install nvcc 13, then build pycoll again",
            )
        try:
            self._dll = ctypes.CDLL(str(path))
            self._dll.pycoll_cuda_last_error.restype = c_char_p
            found = self._dll.pycoll_cuda_abi()
            for name, arguments in FUNCTIONS.items():
                getattr(self._dll, f"pycoll_cuda_{name}").argtypes = arguments
        except (OSError, AttributeError) as error:
            raise unavailable(
                f"{path.name} cannot be used: {error}", "build pycoll again"
            ) from None
        if found != ABI:
            raise unavailable(
                f"{path.name} has version {found}, expected {ABI}", "build pycoll again"
            )
        self.supports = self._dll.pycoll_cuda_supports
        self.for_host = self.versions()[1] == 0

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``pycoll_cuda_<name>``.

        Raises:
            CudaUnavailable, ArgumentError, ScheduleError, TransportError: By what it returns.
        """
        status = getattr(self._dll, f"pycoll_cuda_{name}")(*arguments)
        if status == _OK:
            return
        text = (self._dll.pycoll_cuda_last_error() or b"").decode(errors="replace")
        if status == _UNAVAILABLE:
            raise unavailable(text or "there is no CUDA driver or device", INSTALL)
        kind = {_ARGUMENT: ArgumentError, _TOO_LARGE: ArgumentError, _SCHEDULE: ScheduleError}
        raise kind.get(status, TransportError)(text or f"pycoll_cuda_{name} failed ({status})")

    def pointer(self, name: str, *arguments: Any) -> int:
        """Call a function whose last argument takes the address of a pointer; return that."""
        found = c_void_p()
        self.call(name, *arguments, byref(found))
        return found.value or 0

    def device_count(self) -> int:
        """Return how many devices there are; at least one.

        Raises:
            CudaUnavailable: If there is no driver or no device.
        """
        count = c_int()
        self.call("device_count", byref(count))
        if count.value == 0:
            raise unavailable("there is no CUDA device", INSTALL)
        return count.value

    def versions(self) -> tuple[int, int]:
        """Return the versions of driver (0: none) and runtime, such as 13000."""
        driver, runtime = c_int(), c_int()
        self.call("versions", byref(driver), byref(runtime))
        return driver.value, runtime.value

    def device(self, index: int) -> DeviceInfo:
        """Describe a device."""
        info = DeviceInfo()
        self.call("device_properties", index, byref(info))
        return info

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy bytes between any two memories."""
        self.call("copy", dst, src, nbytes, stream)


def pointers(addresses: Any) -> Any:
    """Return a C array of addresses, 0 for null."""
    values = list(addresses)
    return (c_void_p * len(values))(*(v or None for v in values))


@functools.cache
def library() -> Library:
    """Return the device library of this installation, loaded once.

    Raises:
        CudaUnavailable: If it was not built.
    """
    return Library(Path(__file__).resolve().parents[2] / "libpycoll_cuda.so")

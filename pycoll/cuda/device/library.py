"""The device library as Python sees it: ``libpycoll_cuda.so`` by ctypes.

``csrc/cuda/host/pycoll_cuda.h`` has the contracts of its structures and functions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from importlib import metadata
from pathlib import Path
from typing import Any

from pycoll.config import VERSION
from pycoll.errors import ArgumentError, CudaUnavailable, ScheduleError, TransportError
from pycoll.types import DType, ReduceOp

ABI = 1
NAME, PACKAGE, FOLDER = "libpycoll_cuda.so", "pycollectives-cuda13", "pycoll_cuda13"
MAX_RANKS = 64
_OK, _UNAVAILABLE, _ARGUMENT, _SCHEDULE, _TOO_LARGE = range(5)
VMM, FABRIC, MULTICAST = 1, 2, 4
NO_ERROR, TIMEOUT, ABORTED, MISMATCH, FOLLOWED = range(5)
BEST, INTERPRET, DIRECT, LOW_LATENCY, MULTICAST_SUM, COPIES = range(6)
INSTALL = "install an NVIDIA driver that supports CUDA 13, and see that `nvidia-smi` lists a device"


def unavailable(missing: str, fix: str) -> CudaUnavailable:
    """Make the error that names what is missing, and how to fix it."""
    return CudaUnavailable(
        f"{missing}.\nTo use arrays on a CUDA device: {fix}.\n`pycoll doctor` "
        "lists everything that is needed."
    )


def cupy() -> Any:
    """Import CuPy.

    Raises:
        CudaUnavailable: If it is not installed, or finds no device.
    """
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        raise unavailable(
            f"CuPy cannot be imported ({error})", "pip install cupy-cuda13x"
        ) from error
    if not module.cuda.is_available():
        raise unavailable(
            "CuPy finds no CUDA device", "see that `nvidia-smi` lists one, and install its driver"
        )
    return module


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DeviceInfo(ctypes.Structure):
    """``PycollCudaDevice``."""

    _fields_ = [
        ("name", c_char * 256),
        ("uuid", c_uint8 * 16),
        *_fields(c_int32, "major minor multiprocessors cooperative max_threads_per_block"),
        *_fields(c_int32, "pci_domain pci_bus pci_device runnable reserved"),
        *_fields(c_uint64, "memory_bytes l2_bytes"),
    ]


class Ipc(ctypes.Structure):
    """``PycollCudaIpc``: memory that another process can open."""

    _fields_ = [
        ("handle", c_uint8 * 64),
        *_fields(c_uint64, "offset nbytes"),
        *_fields(c_int32, "device reserved"),
    ]


class Mapping(ctypes.Structure):
    """``PycollCudaMapping``: virtual memory that is mapped here."""

    _fields_ = [
        *_fields(c_void_p, "pointer"),
        *_fields(c_uint64, "nbytes"),
        *_fields(c_int32, "device reserved"),
    ]


class Share(ctypes.Structure):
    """``PycollCudaShare``: what a peer needs to map it, beside a descriptor."""

    _fields_ = [
        ("fabric", c_uint8 * 64),
        *_fields(c_uint64, "nbytes"),
        *_fields(c_int32, "has_fabric reserved"),
    ]


class Multicast(ctypes.Structure):
    """``PycollCudaMulticast``: one address for the same place of the heaps of all ranks."""

    _fields_ = [
        *_fields(c_uint64, "handle nbytes"),
        *_fields(c_void_p, "pointer"),
        *_fields(c_int32, "device open"),
    ]


class KernelError(ctypes.Structure):
    """``PycollCudaError``: what a kernel wrote before it gave up."""

    _fields_ = [
        *_fields(c_uint32, "kind rank peer block step expected seen instruction"),
        *_fields(c_uint64, "waited_ns reserved"),
    ]


class Spec(ctypes.Structure):
    """``PycollCudaCallSpec``: one rank's plan with numbers."""

    _fields_ = [
        *_fields(c_void_p, "code operands"),
        *_fields(c_uint32, "ninstructions noperands rank chunks slots rounds direct dtype op"),
        *_fields(c_uint32, "itemsize layout_in layout_out scale_n scale_at_exit"),
        *_fields(c_uint64, "count chunk descriptor"),
        *_fields(c_void_p, "in_offset in_length out_offset out_length"),
    ]


class CallInfo(ctypes.Structure):
    """``PycollCudaCallInfo``: which code runs a call."""

    _fields_ = [
        ("kernel", c_char * 64),
        *_fields(c_int32, "max_blocks blocks threads registers local_bytes shared_bytes"),
        ("segments", c_uint64),
        *_fields(c_uint64 * MAX_RANKS, "in_bytes out_bytes"),
    ]


class Step(ctypes.Structure):
    """``PycollCudaStep``: an optimizer step."""

    _fields_ = [
        *_fields(c_int32, "kind state grad_type copy_type"),
        *_fields(c_void_p, "param grad"),
        ("slots", c_void_p * 2),
        ("copy", c_void_p),
        ("count", c_uint64),
        *_fields(c_double, "scale keep rate beta1 beta2 root eps decay"),
    ]


class Norm(ctypes.Structure):
    """``PycollCudaNorm``: rows of all ranks to be added and normalised."""

    _fields_ = [
        *_fields(POINTER(c_void_p), "inputs residual out residual_out"),
        ("weight", c_void_p),
        *_fields(c_uint64, "rows hidden"),
        ("eps", c_float),
        *_fields(c_int32, "dtype tree push"),
    ]


class Message(ctypes.Structure):
    """``PycollCudaMessage``: one side of a message."""

    _fields_ = [
        *_fields(c_uint64, "number nbytes"),
        ("array", c_void_p),
        ("offset", c_uint64),
        *_fields(c_int32, "peer slotted posts awaits"),
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
    "vmm_support": (c_int, POINTER(c_int)),
    "vmm_create": (c_int, c_uint64, POINTER(Mapping)),
    "vmm_export": (POINTER(Mapping), POINTER(Share), POINTER(c_int)),
    "vmm_open": (c_int, POINTER(Share), c_int, POINTER(Mapping)),
    "vmm_close": (POINTER(Mapping),),
    "multicast_create": (c_int, c_uint64, POINTER(Multicast), POINTER(c_int)),
    "multicast_open": (c_int, c_uint64, POINTER(Multicast)),
    "multicast_add": (c_int, POINTER(Multicast)),
    "multicast_bind": (POINTER(Mapping), POINTER(Multicast)),
    "multicast_close": (POINTER(Multicast),),
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
    "group_multicast": (c_void_p, c_void_p),
    "group_destroy": (c_void_p,),
    "group_error": (c_void_p, c_int, POINTER(KernelError)),
    "group_failed": (c_void_p, POINTER(c_int)),
    "group_abort": (c_void_p,),
    "group_reset": (c_void_p,),
    "call_create": (c_void_p, POINTER(Spec), c_int, _PP),
    "call_destroy": (c_void_p,),
    "call_info": (c_void_p, c_int, POINTER(CallInfo)),
    "launch": (c_void_p, _PP, _PP, c_int, c_int, c_int, c_uint64, c_uint64, c_void_p),
    "rms_norm": (c_void_p, POINTER(Norm), c_int, c_int, c_uint64, c_uint64, c_void_p),
    "send": (c_void_p, POINTER(Message), c_int, c_int, c_uint64, c_void_p),
    "receive": (c_void_p, POINTER(Message), c_int, c_int, c_uint64, c_void_p),
    "message_taken": (c_void_p, POINTER(Message), POINTER(c_int)),
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
                f"install the wheel of {PACKAGE} {VERSION}, or build pycoll again where nvcc 13 is",
            )
        try:
            self._dll = ctypes.CDLL(str(path))
            self._dll.pycoll_cuda_last_error.restype = c_char_p
            found = self._dll.pycoll_cuda_abi()
            for name, arguments in FUNCTIONS.items():
                getattr(self._dll, f"pycoll_cuda_{name}").argtypes = arguments
            in_packets = self._dll.pycoll_cuda_in_packets
            in_packets.argtypes = c_int, c_int, c_int, c_uint64
            message_parts = self._dll.pycoll_cuda_message_parts
            message_parts.argtypes, message_parts.restype = (c_int, c_uint64, c_int), c_uint64
        except (OSError, AttributeError) as error:
            raise unavailable(
                f"{path.name} cannot be used: {error}", "build pycoll again"
            ) from None
        if found != ABI:
            raise unavailable(
                f"{path.name} has version {found}, expected {ABI}", "build pycoll again"
            )
        self.supports: Any = self._dll.pycoll_cuda_supports
        self.in_packets = in_packets
        self.message_parts = message_parts
        self.for_host: bool = self.versions()[1] == 0

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

    def support(self, device: int) -> int:
        """Return what a device says of virtual memory: `VMM`, `FABRIC`, `MULTICAST`, added up."""
        bits = c_int()
        self.call("vmm_support", device, byref(bits))
        return bits.value

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy bytes between any two memories."""
        self.call("copy", dst, src, nbytes, stream)

    def fold(
        self,
        dtype: DType,
        op: ReduceOp,
        srcs: Sequence[int],
        dsts: Sequence[int],
        count: int,
        tree: bool,
        scale_n: int,
        stream: int,
    ) -> None:
        """Combine sources in order, with the contract of ``csrc/kernels/fold/fold.h``."""
        how = int(dtype), int(op), int(tree), scale_n
        ends = pointers(srcs), len(srcs), pointers(dsts), len(dsts)
        self.call("fold", *how, *ends, count, stream)


def pointers(addresses: Any) -> Any:
    """Return a C array of addresses, 0 for null."""
    values = list(addresses)
    return (c_void_p * len(values))(*(v or None for v in values))


def find(folder: Path) -> Path:
    """Return the path of the library: in a folder, or in its package where that is installed.

    Raises:
        CudaUnavailable: If the package is that of another version of pycoll.
    """
    beside = folder / NAME
    if beside.exists():
        return beside
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return beside
    if package.version != VERSION:
        raise unavailable(
            f"{PACKAGE} {package.version} does not fit pycoll {VERSION}",
            f"install the wheel of {PACKAGE} {VERSION}",
        )
    return Path(str(package.locate_file(f"{FOLDER}/{NAME}")))


@functools.cache
def library() -> Library:
    """Return the device library of this installation, loaded once.

    Raises:
        CudaUnavailable: If there is none.
    """
    return Library(find(Path(__file__).resolve().parents[2]))

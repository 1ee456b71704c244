"""What `pycoll doctor` says of CUDA: what is here, what is missing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from pycoll.config import Config
from pycoll.cuda.device.library import (
    FABRIC,
    INSTALL,
    MULTICAST,
    VMM,
    cupy,
    library,
    unavailable,
)
from pycoll.cuda.transports.nccl_bindings import find_binding
from pycoll.errors import CollError, CudaUnavailable


class Part(NamedTuple):
    """One thing that calls on device arrays need."""

    name: str  # what was looked at
    found: str  # what was found
    fix: str = ""  # what to do about it; empty when all is well


def parts() -> Iterator[Part]:
    """Look at everything that calls on device arrays need."""
    for name, look in (
        ("CUDA kernels", _kernels),
        ("CUDA device", _devices),
        ("peer memory", _peer_memory),
        ("CuPy", _cupy),
        ("NCCL", _nccl),
    ):
        try:
            yield Part(name, look())
        except CudaUnavailable as error:
            found, advice, *_ = str(error).split("\n")
            fix = advice.removeprefix("To use arrays on a CUDA device: ").rstrip(".")
            yield Part(name, found, fix)


def _kernels() -> str:
    version = library().versions()[1]
    return f"{library().path.name}, CUDA {_version(version)}"


def _devices() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise unavailable("there is no CUDA driver (libcuda.so.1)", INSTALL) from None
    count, driver = library().device_count(), library().versions()[0]
    devices = [library().device(i) for i in range(count)]
    names = [d.name.decode() + ("" if d.runnable else " (too old)") for d in devices]
    return f"{', '.join(names)}; driver for CUDA {_version(driver)}"


def _peer_memory() -> str:
    """Tell how ranks would map each other's heaps, as one process can find out."""
    found = [_way(device) for device in range(library().device_count())]
    ways = dict.fromkeys(found)  # in order
    if len(ways) == 1:
        return found[0]
    return "; ".join(f"device {i}: {way}" for i, way in enumerate(found))


def _way(device: int) -> str:
    if Config.from_env().device_memory == "ipc":
        return "CUDA IPC, as PYCOLL_DEVICE_MEMORY says"
    bits = library().support(device)
    if not bits & VMM:
        return "CUDA IPC, as there is no virtual memory that can be shared"
    from pycoll.cuda.device.heap import try_virtual_memory  # it needs the engine

    try:
        try_virtual_memory(device)
    except CollError as error:
        return f"CUDA IPC, as virtual memory is refused: {error}"
    more = ("fabric handles", bits & FABRIC), ("multicast", bits & MULTICAST)
    says = [f"{name}: {'yes' if bit else 'no'}" for name, bit in more]
    return f"virtual memory by descriptors ({', '.join(says)})"


def _cupy() -> str:
    return f"version {cupy().__version__}"


def _nccl() -> str:
    binding = find_binding()
    major, rest = divmod(binding.version(), 10000)
    return f"{major}.{rest // 100}.{rest % 100} by {binding.name}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"

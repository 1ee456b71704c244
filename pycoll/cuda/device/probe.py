"""What of CUDA is here and what is missing, for people: no error, nothing is started."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from pycoll.cuda.device.errors import unavailable
from pycoll.errors import CudaUnavailable


class Part(NamedTuple):
    """One thing that calls on device arrays need.

    Attributes:
        name: What was looked at.
        found: What was found.
        fix: What to do about it; empty when all is well.
    """

    name: str
    found: str
    fix: str = ""


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


def parts() -> Iterator[Part]:
    """Look at everything that calls on device arrays need."""
    for name, look in (
        ("CUDA kernels", _kernels),
        ("CUDA device", _devices),
        ("CuPy", _cupy),
        ("NCCL", _nccl),
    ):
        try:
            yield Part(name, look())
        except CudaUnavailable as error:
            found, _, advice = str(error).partition("\n")
            fix = (
                advice.partition("\n")[0]
                .removeprefix("To use arrays on a CUDA device: ")
                .rstrip(".")
            )
            yield Part(name, found, fix)


def missing() -> list[str]:
    """Return what is missing for arrays on CUDA devices, one line each; empty if they work."""
    return [f"{part.name}: {part.found} {part.fix}" for part in parts() if part.fix]


def _kernels() -> str:
    from pycoll.cuda.device.library import library

    version = library().versions()[1]
    return f"{library().path.name}, CUDA {_version(version)}"


def _devices() -> str:
    from pycoll.cuda.device.library import INSTALL, library

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise unavailable("there is no CUDA driver (libcuda.so.1)", INSTALL) from None
    count, driver = library().device_count(), library().versions()[0]
    devices = [library().device(i) for i in range(count)]
    names = [d.name.decode() + ("" if d.runnable else " (too old)") for d in devices]
    return f"{', '.join(names)}; driver for CUDA {_version(driver)}"


def _cupy() -> str:
    return f"version {cupy().__version__}"


def _nccl() -> str:
    from pycoll.cuda.transports.nccl_bindings import find_binding

    binding = find_binding()
    major, rest = divmod(binding.version(), 10000)
    return f"{major}.{rest // 100}.{rest % 100} by {binding.name}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"

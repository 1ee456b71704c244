"""The fused kernels of `pycoll.kernels` for vectors on a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import Step, library
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, dtype_of


def machine(vectors: dict[str, Any]) -> tuple[Any, ...]:
    """Return `DeviceKernels` of the current device, and a view of each vector, None for none.

    Args:
        vectors: Arrays by what they are called in messages; None where there is none.

    Raises:
        ArgumentError: If one lies in host memory or on another device.
        CudaUnavailable: If something is missing that arrays on devices need.
    """
    stream, device = arrays.stream_of(None), arrays.cupy().cuda.Device().id
    views = {k: None if x is None else _view(x, k, stream) for k, x in vectors.items()}
    for name, v in views.items():
        if v is not None and arrays.device_of(v) != device:
            raise ArgumentError(
                f"{name} lies on device {arrays.device_of(v)}, but device {device} is current: "
                f"call cupy.cuda.Device({arrays.device_of(v)}).use() first"
            )
    own = all(x is None or arrays.is_cupy(x) for x in vectors.values())
    return DeviceKernels(stream, waits=not own), *views.values()


def _view(x: Any, what: str, stream: int) -> ArrayView:
    """Look at an array; quickly at one of CuPy."""
    if not arrays.is_cupy(x):
        return arrays.device_view(x, what, stream)
    array = _C.array_at(x.data.ptr, x.shape, x.strides, x.dtype, x)
    return ArrayView(array, dtype_of(x.dtype), x.dtype.name, x)


class DeviceKernels:
    """The functions of `pycoll._C` that `pycoll.kernels` needs, for vectors on a device.

    Vectors are addresses. Everything is put on one stream.
    """

    def __init__(self, stream: int, waits: bool) -> None:
        """Take a stream, which is CuPy's current one.

        Args:
            stream: Its handle.
            waits: Steps wait until they are done: the next stream of the vectors is unknown.
        """
        self._stream, self._waits = stream, waits

    def optim_step(
        self,
        kind: int,
        state: int,
        grad: int,
        copy: int,
        param: int,
        gradient: int,
        first: int,
        second: int,
        target: int,
        count: int,
        scalars: list[float],
    ) -> None:
        """Step an optimizer."""
        types, slots = (kind, state, grad, copy), (first, second)
        step = Step(*types, param, gradient, slots, target, count, *scalars)
        library().call("optim_step", ctypes.byref(step), self._stream)
        if self._waits:
            library().call("synchronize", self._stream)

    def optim_unscale(self, kind: int, source: int, target: int, count: int, scale: float) -> int:
        """Multiply; return how many results are not finite."""
        return int(self._tally("optim_unscale", 1, kind, source, target, count, scale)[0])

    def optim_nonfinite(self, kind: int, data: int, count: int) -> int:
        """Count infinities and NaNs."""
        return int(self._tally("optim_nonfinite", 1, kind, data, count)[0])

    def optim_add_squares(self, kind: int, data: int, count: int, limbs: np.ndarray) -> int:
        """Add squares to an accumulator on the host; return how many are not finite."""
        if limbs.shape != (_C.EXACT_LIMBS,):
            raise ArgumentError(f"the accumulator has {_C.EXACT_LIMBS} limbs")
        found = self._tally("optim_add_squares", _C.EXACT_LIMBS + 1, kind, data, count)
        library().call("add_limbs", _C.address(limbs), _C.address(found))
        return int(found[_C.EXACT_LIMBS])

    def _tally(self, name: str, counters: int, *arguments: Any) -> np.ndarray:
        """Launch what adds to counters; wait, and return them."""
        tally = arrays.cupy().zeros(counters, np.uint64)
        library().call(name, *arguments, tally.data.ptr, self._stream)
        return tally.get()

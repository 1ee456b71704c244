"""Arrays on a device: CuPy, ``__cuda_array_interface__``, DLPack; and streams.

A device array becomes an `ArrayView` like any other: its NumPy array has shape, strides and address
of the device memory, and is never read or written. CuPy is imported when the first one appears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.cuda.device.library import cupy, library
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, dlpack_view, dtype_of, on_device

_MIXED = (
    "lies in host memory, but other arrays of this call on a CUDA device; a call takes arrays of "
    "one kind"
)


def is_cupy(x: Any) -> bool:
    """Whether an object is an array of CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def device_view(x: Any, what: str, stream: int) -> ArrayView:
    """Look at an array on a device; kernels on ``stream`` may use it.

    Args:
        x: The array.
        what: What it is called in error messages.
        stream: Handle of the stream on which it will be used.

    Raises:
        ArgumentError: If it is no array on a CUDA device.
    """
    if is_cupy(x) or not hasattr(x, "__dlpack_device__"):
        return _from_interface(x, what, stream)
    if not on_device(x):
        raise ArgumentError(f"{what} {_MIXED}")
    return dlpack_view(x, what, stream=stream or 1)  # 1 is the legacy default stream


def _from_interface(x: Any, what: str, stream: int) -> ArrayView:
    facts = getattr(x, "__cuda_array_interface__", None)
    if facts is None:
        raise ArgumentError(f"{what} {_MIXED}")
    if facts.get("mask") is not None:
        raise ArgumentError(f"{what} is a masked array; pass its data")
    shape, strides = tuple(facts["shape"]), facts.get("strides")
    dtype = np.dtype(getattr(x, "dtype", None) if is_cupy(x) else facts["typestr"])
    if strides is None:
        strides = np.cumprod([1, *shape[:0:-1]])[::-1] * dtype.itemsize if shape else ()
    pointer, read_only = facts["data"]
    array = _C.array_at(pointer, shape, tuple(int(s) for s in strides), dtype, x)
    if read_only:
        array.flags.writeable = False
    producer = facts.get("stream")
    if producer not in (None, stream) and not is_cupy(x):
        order(stream, 0 if producer == 1 else producer)
    return ArrayView(array, dtype_of(dtype), dtype.name, x)


def order(later: int, earlier: int) -> None:
    """Make a stream wait for what has been put on another one."""
    runtime = cupy().cuda.runtime
    event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    try:
        runtime.eventRecord(event, earlier)
        runtime.streamWaitEvent(later, event)
    finally:
        runtime.eventDestroy(event)


def device_of(v: ArrayView) -> int:
    """Return the number of the device on which an array lies."""
    x = v.source
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    return int(cupy().cuda.runtime.pointerGetAttributes(v.pointer).device)


def stream_of(stream: Any) -> int:
    """Return the handle of a stream; None stands for the current one of CuPy.

    Raises:
        ArgumentError: If it is no stream.
    """
    if stream is None:
        return int(cupy().cuda.get_current_stream().ptr)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("ptr", "cuda_stream"):  # older CuPy, PyTorch
        if isinstance(getattr(stream, name, None), int):
            return getattr(stream, name)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    raise ArgumentError(
        f"stream={stream!r}; accepted are objects with __cuda_stream__, or a handle as an integer"
    )


def new_like(v: ArrayView, shape: tuple[int, ...]) -> Any:
    """Make an uninitialised array of the caller's own kind, on the same device."""
    if not is_cupy(v.source) and hasattr(v.source, "new_empty"):
        return v.source.new_empty(shape)
    module = cupy()
    with module.cuda.Device(device_of(v)):
        return module.empty(shape, v.array.dtype)


def duplicate(v: ArrayView, make: Callable[..., Any], stream: int) -> ArrayView:
    """Return a contiguous copy.

    Args:
        v: The array.
        make: Makes an uninitialised array, from its shape and dtype.
        stream: Handle of the stream on which it is filled.
    """
    module = cupy()
    with module.cuda.Device(device_of(v)), external(stream):
        copy = make(v.array.shape, v.array.dtype)
        if v.array.flags.c_contiguous:  # of any type, also those that CuPy does not know
            library().copy(copy.data.ptr, v.pointer, v.array.nbytes, stream)
        else:
            copy[...] = module.asarray(v.source)
    return _from_interface(copy, "x", stream)._replace(dtype=v.dtype, name=v.name, source=v.source)


def external(stream: int) -> Any:
    """Return CuPy's view of a stream, as a context."""
    cuda = cupy().cuda
    return cuda.Stream.from_external(_Handle(stream)) if stream else cuda.Stream.null


class _Handle:
    """A stream of which only the handle is known."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and handle."""
        return 0, self._handle

"""What a CUDA device leaves in the memory of its host: states of the optimizer, and activations.

The memory is pinned. Kernels that update parameters read and write the states where they are, over
the bus. Activations are copied by a stream of their own, which events keep in order with the stream
of the layers. No copy is waited for on the host.
"""

from __future__ import annotations

import importlib
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ROUND = 512


class HostMemory:
    """Pinned memory, in place of a `Storage`; of the current device."""

    paged = False

    def __init__(self) -> None:
        """Make a stream for copies."""
        self._cupy: Any = importlib.import_module("cupy")
        self._device = self._cupy.cuda.Device().id
        self._copies = self._cupy.cuda.Stream(non_blocking=True)
        self._lock = threading.RLock()  # a block may be released while another one is reserved
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def reserve(self, nbytes: int) -> Any:
        """Return pinned memory.

        Raises:
            OSError: If there is none.
        """
        size = _rounded(nbytes)
        with self._lock:
            return self._free[size].pop() if self._free[size] else self._pinned(size)

    def release(self, place: Any, nbytes: int) -> None:
        """Let it be used again, for a copy that follows those that were asked for."""
        with self._lock:
            self._free[_rounded(nbytes)].append(place)

    def _pinned(self, nbytes: int) -> np.ndarray:
        try:
            return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        except (MemoryError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise OSError(f"no pinned memory on the host: {error}") from error

    def owns(self, x: Any) -> bool:
        """Tell whether it can keep an array."""
        return isinstance(x, self._cupy.ndarray)

    def address(self, x: Any) -> int:
        """Return the address of an array."""
        return x.data.ptr

    def empty(self, nbytes: int) -> Any:
        """Return bytes on the device."""
        return self._cupy.empty((nbytes,), np.uint8)

    def view(self, memory: Any, offset: int, like: Any) -> Any:
        """Return an array in such bytes, with shape, strides and type of another one."""
        place = memory.data + offset
        return self._cupy.ndarray(like.shape, like.dtype, place, strides=like.strides)

    def write(self, data: Any, place: Any) -> None:
        """Start to copy bytes of the device into pinned memory."""
        self._copy(place.ctypes.data, data.data.ptr, data.nbytes)

    def read(self, into: Any, place: Any) -> None:
        """Start to copy them back."""
        self._copy(into.data.ptr, place.ctypes.data, into.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self._copies.wait_event(self._layers().record())
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self._copies.ptr)

    def later(self, function: Callable[..., Any], *args: Any) -> Ticket:
        """Call a function that starts copies; what it has used is kept until they are over."""
        result = function(*args)
        return Ticket(result, args, self._copies.record(), self._layers)

    def _layers(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def vector(self, count: int, dtype: Any) -> Pinned:
        """Return a vector of zeros in pinned memory that kernels reach.

        Raises:
            OSError: If there is none.
        """
        nbytes = max(1, count * np.dtype(dtype).itemsize)
        memory, cuda = self._pinned(nbytes), self._cupy.cuda
        memory.fill(0)
        owned = cuda.UnownedMemory(memory.ctypes.data, nbytes, memory, self._device)
        return Pinned(self._cupy.ndarray((count,), dtype, cuda.MemoryPointer(owned, 0)))

    def close(self) -> None:
        """Wait for all copies."""
        self._copies.synchronize()


class Pinned(NamedTuple):
    """A vector in pinned memory."""

    array: Any


class Ticket:
    """Copies that have been started, and what they work on."""

    def __init__(self, value: Any, used: Any, event: Any, layers: Callable[[], Any]) -> None:
        """Keep the result of a function and what it has used until `event`."""
        self._value, self._used, self._event, self._layers = value, used, event, layers

    def result(self) -> Any:
        """Let what comes next on the stream of the layers run after the copies."""
        if self._event is not None:
            self._layers().wait_event(self._event)
            self._event = self._used = None
        return self._value

    def __del__(self) -> None:
        if self._event is not None:  # nobody will: an error ended the step
            self._event.synchronize()


def _rounded(nbytes: int) -> int:
    return -(-max(1, nbytes) // _ROUND) * _ROUND

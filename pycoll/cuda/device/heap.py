"""Which arrays on a device peers reach: all, none, or those of the symmetric heap."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from ctypes import byref, c_int
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import VMM, Mapping, Share, library
from pycoll.errors import ArgumentError, CudaUnavailable, TransportError
from pycoll.runtime.arrays.host_arrays import ArrayView

_ALIGN = 256


class AnyMemory:
    """All memory of the device: what ranks in one process reach without doing anything."""

    base: int = 0  # where what peers reach begins; 0: it has no bounds, or there is none yet

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Make an array that peers reach."""
        return arrays.cupy().empty(shape, dtype)

    def holds(self, v: ArrayView) -> bool:
        """Tell that peers reach it."""
        return True

    def has(self, v: ArrayView) -> bool:
        """Tell that on devices no call reads inputs alone where they are."""
        return False

    def registered(self, v: ArrayView) -> None:
        """Return None: nothing lies elsewhere."""

    def reach(self, v: ArrayView) -> Any:
        """Return None: peers write an array where it is."""


class NoMemory(AnyMemory):
    """What ranks that send messages reach of each other."""

    def holds(self, v: ArrayView) -> bool:
        """Tell that peers reach nothing."""
        return False


class Detour(NamedTuple):
    """An array in the heap in which a result is made that belongs elsewhere."""

    made: Any  # the array in the heap
    wanted: ArrayView  # where the result belongs

    @property
    def address(self) -> int:
        """Where kernels write."""
        return int(self.made.data.ptr)

    def scatter(self, stream: int) -> None:
        """Put the result where it belongs, behind what a stream has to do before."""
        library().copy(self.wanted.pointer, self.address, self.wanted.array.nbytes, stream)


class DeviceHeap(AnyMemory):
    """A rank's part of the symmetric device heap: one allocation, cut up by first fit.

    Attributes:
        base: Where it begins, 0 before the first array.
        virtual: It is, or will be, virtual memory, which peers map by a descriptor; otherwise they
            map it by CUDA IPC.
        mapping: The virtual memory, if it is that.
    """

    def __init__(self, device: int, nbytes: int, virtual: bool) -> None:
        """Reserve nothing yet.

        Args:
            device: Number of the device.
            nbytes: Capacity.
            virtual: Make it of virtual memory where the device has that.
        """
        self.device = device
        self.nbytes = nbytes
        self.base: int = 0
        self.virtual: bool = virtual and bool(library().support(device) & VMM)
        self.mapping: Mapping | None = None

    def _make(self) -> None:
        """Take the memory, by CUDA IPC if virtual memory cannot be had."""
        if self.virtual:
            mapping = Mapping()
            try:
                library().call("vmm_create", self.device, self.nbytes, byref(mapping))
            except (CudaUnavailable, TransportError):
                self.virtual = False
            else:
                self.base, self.mapping = mapping.pointer, mapping
                free = partial(library().call, "vmm_close", byref(mapping))
        if not self.base:
            self.base = library().pointer("malloc", self.device, self.nbytes)
            free = partial(library().call, "free", self.base)
        self._blocks = _Blocks(self.base, self.nbytes, free)

    def begin_anew(self) -> None:
        """Have no heap yet, and make one for CUDA IPC; arrays that were made lie outside of it."""
        self.free()
        self.base, self.mapping, self.virtual = 0, None, False

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Allocate an array; the memory goes back to the heap when it is collected.

        Raises:
            MemoryError: If the heap has no room for it.
        """
        cupy = arrays.cupy()
        kind = np.dtype(dtype)
        extent = tuple(int(k) for k in ([shape] if np.ndim(shape) == 0 else shape))
        if kind.hasobject or min(extent, default=0) < 0:
            raise ArgumentError(f"shape={shape!r}, dtype={kind}: no such array can be made")
        if not self.base:
            self._make()
        nbytes = max(1, math.prod(extent) * kind.itemsize)
        address = self._blocks.take(nbytes)
        if address is None:
            raise MemoryError(
                f"the symmetric device heap of {self.nbytes} bytes has no {nbytes} left; make it "
                "larger: init(device_heap_bytes=...)"
            )
        owner = _Block(self._blocks, address, nbytes)
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device)
        with cupy.cuda.Device(self.device):
            return cupy.ndarray(extent, kind, cupy.cuda.MemoryPointer(memory, 0))

    def free(self) -> None:
        """Free the memory as soon as no array lies in it; no peer may be using it."""
        if self.base:
            self._blocks.end()

    def holds(self, v: ArrayView) -> bool:
        """Whether peers reach all of an array."""
        end = v.pointer + v.array.nbytes
        return bool(self.base) and self.base <= v.pointer and end <= self.base + self.nbytes

    def reach(self, v: ArrayView) -> Detour | None:
        """Return where peers write an array, or None if it is where it is."""
        return None if self.holds(v) else Detour(self.empty(v.array.shape, v.array.dtype), v)


def try_virtual_memory(device: int) -> None:
    """Make a little virtual memory, and map it a second time as a peer would.

    Raises:
        CollError: What refuses it.
    """
    made, again, share, descriptor = Mapping(), Mapping(), Share(), c_int(-1)
    library().call("vmm_create", device, 1, byref(made))
    try:
        library().call("vmm_export", byref(made), byref(share), byref(descriptor))
        try:
            library().call("vmm_open", device, byref(share), descriptor.value, byref(again))
            library().call("vmm_close", byref(again))
        finally:
            os.close(descriptor.value)
    finally:
        library().call("vmm_close", byref(made))


class _Blocks:
    """Free stretches of a stretch of memory: first fit, neighbours grow together again."""

    def __init__(self, base: int, nbytes: int, free: Callable[[], None]) -> None:
        self._base, self._nbytes, self._ends, self._give_up = base, nbytes, False, free
        self._free = [(base, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Return the address of a block, or None if there is no room."""
        wanted = _rounded(nbytes)
        for i, (start, size) in enumerate(self._free):
            if size >= wanted:
                self._free[i : i + 1] = [(start + wanted, size - wanted)] if size > wanted else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take a block back."""
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, _rounded(nbytes))]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((begin, size))
        self._free = merged
        if self._ends:
            self.end()

    def end(self) -> None:
        """Give the whole stretch back to the device once all of it is free."""
        self._ends = True
        if self._free == [(self._base, self._nbytes)]:
            self._free = []
            self._give_up()


class _Block:
    """Gives a block back when the array over it is collected."""

    def __init__(self, blocks: _Blocks, start: int, nbytes: int) -> None:
        self._blocks, self._start, self._nbytes = blocks, start, nbytes

    def __del__(self) -> None:
        self._blocks.give(self._start, self._nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN

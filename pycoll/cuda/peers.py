"""Ranks that reach each other's device memory: by CUDA IPC between processes of one host.

Every rank exports its control memory, its cells and, once it has one, its symmetric heap; the host
communicator carries the handles. An array outside the heap goes through the cells.
"""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from ctypes import byref, c_int
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycoll.cuda import arrays
from pycoll.cuda.library import Ipc, KernelError, library, pointers
from pycoll.cuda.links import kernel_failure, wait_for
from pycoll.cuda.preparing import AnyMemory
from pycoll.cuda.transport import CallCache
from pycoll.errors import ArgumentError, CollError, TransportError
from pycoll.runtime.arrays import ArrayView
from pycoll.runtime.plans import CallSpec
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.runtime.session import Session

MAX_BLOCKS = 64  # of a rank
_CELL_BYTES = 8 << 20
_ALIGN = 256


class Detour(NamedTuple):
    """An array in the heap in which a result is made that belongs elsewhere.

    Attributes:
        made: The array in the heap.
        wanted: Where the result belongs.
    """

    made: Any
    wanted: ArrayView

    @property
    def address(self) -> int:
        """Where kernels write."""
        return int(self.made.data.ptr)

    def scatter(self, stream: int) -> None:
        """Put the result where it belongs, behind what a stream has to do before."""
        library().copy(self.wanted.pointer, self.address, self.wanted.array.nbytes, stream)


class DeviceHeap(AnyMemory):
    """A rank's part of the symmetric device heap: one allocation, cut up by CuPy's memory pool."""

    def __init__(self, device: int, nbytes: int) -> None:
        """Reserve nothing yet.

        Args:
            device: Number of the device.
            nbytes: Capacity.
        """
        self.device, self.nbytes, self.base = device, nbytes, 0
        self._pool: Any = None

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
            self.base = library().pointer("malloc", self.device, self.nbytes)
            self._blocks = _Blocks(self.base, self.nbytes)
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

    def holds(self, v: ArrayView) -> bool:
        """Whether peers reach all of an array."""
        start = v.pointer
        return bool(self.base) and (
            self.base <= start and start + v.array.nbytes <= self.base + self.nbytes
        )

    def reach(self, v: ArrayView) -> Detour | None:
        """Return where peers write an array, or None if it is where it is."""
        return None if self.holds(v) else Detour(self.empty(v.array.shape, v.array.dtype), v)


class _Blocks:
    """Free stretches of a stretch of memory: first fit, neighbours grow together again."""

    def __init__(self, base: int, nbytes: int) -> None:
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


class _Block:
    """Gives a block back when the array over it is collected."""

    def __init__(self, blocks: _Blocks, start: int, nbytes: int) -> None:
        self._blocks, self._start, self._nbytes = blocks, start, nbytes

    def __del__(self) -> None:
        self._blocks.give(self._start, self._nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class PeerLink:
    """Kernels of ours over memory that peers map; see `pycoll.cuda.links.Link`."""

    name = "CUDA peer memory"
    messages = False

    def __init__(self, session: Session, device: int, heap_bytes: int) -> None:
        """Take a device.

        Raises:
            CudaUnavailable: If that cannot be had.
        """
        library().call("preload", device)
        self.device = device
        self.memory = DeviceHeap(device, heap_bytes)
        self._rank, self._n = session.rank, session.world_size
        self._connected: list[int] | None = None  # generations as of the newest exchange
        self._wanted: list[int] = []
        self._opened: list[int] = []
        self._group = self._cells = 0
        self._calls: CallCache | None = None

    @property
    def generation(self) -> int:
        """1 before there is a heap, then 2."""
        return 2 if self.memory.base else 1

    def prepare(self, spec: CallSpec) -> None:
        """Nothing to check: the plans are checked when the call is made."""

    def heard(self, generations: list[int]) -> None:
        """Take note of who has a heap by now."""
        self._wanted = generations

    def open(self, session: Session) -> None:
        """Map the memory of peers that is not mapped yet; a collective."""
        if self._connected == self._wanted:
            return
        if self._connected is None:
            key = zlib.crc32(repr(session.config).encode())
            self._group = library().pointer(
                "group_peer", self.device, self._rank, self._n, MAX_BLOCKS, key
            )
            self._cells = library().pointer("malloc", self.device, 2 * _CELL_BYTES)
            self._calls = CallCache(self._group, self._n, [self._rank])
        arrays.cupy().cuda.runtime.deviceSynchronize()  # nothing runs while maps change
        control = library().pointer("group_control", self._group)
        maps = [self._exchange(session, p) for p in (control, self._cells, self.memory.base)]
        heaps = pointers(maps[2]) if all(maps[2]) else None
        library().call(
            "group_connect",
            self._group,
            pointers(maps[0]),
            heaps,
            self.memory.nbytes if heaps else 0,
            pointers(maps[1]),
            _CELL_BYTES,
        )
        session.call(Kind.BARRIER, None, None, "sum", 0, None)
        self._connected = self._wanted

    def _exchange(self, session: Session, pointer: int) -> list[int]:
        """Give all ranks a pointer of this one; return theirs, as mapped here, 0 for none."""

        def export() -> np.ndarray:
            ipc = Ipc()
            if pointer:
                library().call("ipc_export", pointer, byref(ipc))
            head = np.array([os.getpid(), pointer], np.int64).view(np.uint8)
            return np.concatenate([head, np.frombuffer(bytes(ipc), np.uint8)])

        own = session.refusing(export)
        rows = session.call(Kind.ALL_GATHER, own.reshape(1, -1), None, "sum", 0, None)
        return session.refusing(lambda: [self._map(rank, row) for rank, row in enumerate(rows)])

    def _map(self, rank: int, row: np.ndarray) -> int:
        pid, pointer = row[:16].view(np.int64).tolist()
        if rank == self._rank or pid == os.getpid() or not pointer:
            return pointer  # threads share addresses
        ipc = Ipc.from_buffer_copy(row[16:].tobytes())
        base, here = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            library().call("ipc_open", self.device, byref(ipc), byref(base), byref(here))
        except CollError as error:
            raise TransportError(
                f"memory of rank {rank}'s device cannot be mapped on device "
                f"{self.device}: {error}; device_transport='nccl' does without"
            ) from error
        self._opened.append(base.value or 0)
        return here.value or 0

    def launch(
        self, spec: CallSpec, in_pointer: int, out_pointer: int, stream: int, limit: float
    ) -> None:
        """See `Link`."""
        capturing = bool(arrays.cupy().cuda.runtime.streamIsCapturing(stream))
        call = self._calls.find(spec, pin=capturing)
        ins, outs = pointers([in_pointer]), pointers([out_pointer])
        library().call("launch", call, ins, outs, 0, 0, 0, int(limit * 1e9), 0, stream)

    def error(self) -> CollError | None:
        """See `Link`."""
        failed = c_int()
        if not self._group:
            return None
        library().call("group_failed", self._group, byref(failed))
        if not failed.value:
            return None
        record = KernelError()
        library().call("group_error", self._group, self._rank, byref(record))
        return kernel_failure(record) or TransportError(
            "a peer's kernel gave up, so the call was left on this rank's device too"
        )

    def wait(self, event: Any, timeout: float) -> None:
        """See `Link`."""
        wait_for(event, timeout, "the kernel")

    def abort(self) -> None:
        """See `Link`."""
        if self._group:
            library().call("group_abort", self._group)

    def close(self) -> None:
        """Forget everything.

        Peers may have this rank's memory mapped, and freeing memory that another process has
        mapped is undefined in CUDA: it stays until the process ends.
        """
        self._connected, self._group = None, 0

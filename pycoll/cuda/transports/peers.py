"""Ranks that reach each other's device memory: by CUDA IPC between processes of one host.

Every rank exports its control memory, its staging buffers and its symmetric heap, once it has one;
the host communicator carries the handles. An array outside the heap goes through the staging
buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from typing import Any, NamedTuple

import numpy as np

from pycoll.cuda.device import arrays
from pycoll.cuda.device.heap import DeviceHeap
from pycoll.cuda.device.library import Ipc, KernelError, library, pointers
from pycoll.cuda.transports.base import Place, Transport, kernel_failure, places, wait_for
from pycoll.cuda.transports.bound_calls import CallCache, nanoseconds
from pycoll.errors import ArgumentError, CollError, TransportError
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

MAX_BLOCKS = 64  # of a rank
_CELL_BYTES = 8 << 20


class _Retired(NamedTuple):
    """What a closed communicator has left, which peers may still use.

    Freeing memory that another process has mapped is undefined in CUDA.
    """

    control: Any  # tells which ranks have left the communicator
    free: Callable[[], None]  # frees it all


_retired: list[_Retired] = []


def _free_retired() -> None:
    """Free what no peer can be using any more."""
    for old in list(_retired):
        if old.control.deserted():
            with contextlib.suppress(ValueError):  # another thread was faster
                _retired.remove(old)
                old.free()


class PeerTransport(Transport):
    """Our own kernels over memory that peers map; see `pycoll.cuda.transports.base.Transport`."""

    name = "CUDA peer memory"
    messages = False

    def __init__(self, session: Session, device: int, heap_bytes: int) -> None:
        """Take a device.

        Raises:
            CudaUnavailable: If that cannot be had.
        """
        library().call("preload", device)
        _free_retired()
        self.device = device
        self.memory = DeviceHeap(device, heap_bytes)
        self._rank, self._n = session.rank, session.world_size
        self._connected: list[int] | None = None  # generations as of the newest exchange
        self._wanted: list[int] = []
        self._opened: list[int] = []
        self._control = session.control
        self._group = self._cells = 0
        self._failed = False
        self._calls: CallCache | None = None

    @property
    def generation(self) -> int:
        """1 before there is a heap, then 2."""
        return 2 if self.memory.base else 1

    def set_generations(self, generations: list[int]) -> None:
        """Note which ranks have a heap."""
        self._wanted = generations

    def open(self, session: Session) -> None:
        """Map the memory of peers that is not mapped yet; a collective."""
        if self._connected == self._wanted:
            return
        if self._connected is None:
            self._begin(session)
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

    def _begin(self, session: Session) -> None:
        """Make this rank's end of the group.

        Raises:
            ArgumentError: If ranks of one process share a device; on every rank.
        """
        found = places(session, library().device(self.device))
        if not library().for_host:
            _check_apart(found)
        key = zlib.crc32(repr(session.config).encode())
        self._group = library().pointer(
            "group_peer", self.device, self._rank, self._n, MAX_BLOCKS, key
        )
        share = max(Counter(place.device for place in found).values())
        library().call("group_share", self._group, share)
        self._cells = library().pointer("malloc", self.device, 2 * _CELL_BYTES)
        self._calls = CallCache(self._group, self._n, [self._rank])

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
        if rank == self._rank or not pointer:
            return pointer
        ipc = Ipc.from_buffer_copy(row[16:].tobytes())
        base, here = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            if pid == os.getpid():  # threads share addresses
                library().call("enable_peer_access", self.device, ipc.device)
                return pointer
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
        """See `Transport`."""
        capturing = bool(arrays.cupy().cuda.runtime.streamIsCapturing(stream))
        call = self._calls.find(spec, pin=capturing)
        ins, outs = pointers([in_pointer]), pointers([out_pointer])
        library().call("launch", call, ins, outs, 0, 0, 0, nanoseconds(limit), 0, stream)

    def error(self) -> CollError | None:
        """See `Transport`."""
        failed = c_int()
        if not self._group:
            return None
        library().call("group_failed", self._group, byref(failed))
        if not failed.value:
            return None
        self._failed = True
        record = KernelError()
        library().call("group_error", self._group, self._rank, byref(record))
        return kernel_failure(record) or TransportError(
            "a peer's kernel gave up, so the call was left on this rank's device too"
        )

    def wait(self, event: Any, timeout: float) -> None:
        """See `Transport`."""
        wait_for(event, timeout, "the kernel")

    def abort(self) -> None:
        """See `Transport`."""
        self._failed = True
        if self._group:
            library().call("group_abort", self._group)

    def close(self) -> None:
        """See `Transport`; one's own memory is freed when all peers have stopped using it.

        After a failure it is unknown what still runs: then the memory stays until the process ends.
        """
        group, cells, self._group, self._connected = self._group, self._cells, 0, None
        if self._failed:
            return
        if not group:  # no peer has mapped the heap
            self.memory.free()
            return
        if self._calls is not None:
            self._calls.clear()
        for base in self._opened:
            library().call("ipc_close", self.device, base)
        self._opened.clear()

        def free() -> None:
            library().call("group_destroy", group)
            library().call("free", cells)
            self.memory.free()

        _retired.append(_Retired(self._control, free))
        self._control = None

    def free(self) -> None:
        """See `Transport`."""
        _free_retired()


def _check_apart(found: Sequence[Place]) -> None:
    """Refuse ranks of one process on one device: their kernels may run one after the other.

    Streams of one process are not apart: the default stream is one for all threads, and allocating,
    loading and freeing wait for the device. A kernel that waits for the next one never ends.
    """
    for rank, place in enumerate(found):
        first = found.index(place)
        if first != rank:
            raise ArgumentError(
                f"ranks {first} and {rank} are threads of one process on one device, where the "
                "kernel of one may have to end before that of the other begins, for which it "
                "waits; pycoll.virtual_ranks runs all ranks of a device in one kernel"
            )

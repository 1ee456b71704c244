"""Mapping device memory of peers: by CUDA IPC, and heaps by virtual memory where all ranks can.

Virtual memory is opened by a descriptor, and where a peer cannot be sent one, as between two
containers, by a fabric handle if all have one. What serves one rank and not another serves nobody:
the ranks agree, and otherwise all of them begin a heap for CUDA IPC.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from pycoll.cuda.device.heap import DeviceHeap
from pycoll.cuda.device.library import Ipc, Mapping, Share, library
from pycoll.cuda.transports.descriptors import LIMIT_S, NAME_BYTES, Counter, close_all
from pycoll.errors import CollError, TransportError
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_T = TypeVar("_T")


class _Heap(NamedTuple):
    """What a rank tells of its heap."""

    virtual: bool  # it is virtual memory, or will be
    ready: bool  # and can be handed to peers
    there: bool  # it has been made
    name: bytes  # of the counter at which its descriptor lies
    share: Share

    def pack(self) -> np.ndarray:
        """Return it as a row of bytes."""
        flags = bytes([self.virtual, self.ready, self.there])
        raw = flags + self.name.ljust(NAME_BYTES) + bytes(self.share)
        return np.frombuffer(raw, np.uint8).reshape(1, -1)

    @classmethod
    def unpack(cls, row: np.ndarray) -> _Heap:
        """Return what a rank has packed."""
        flags, name, share = np.split(row, [3, 3 + NAME_BYTES])
        told = Share.from_buffer_copy(share.tobytes())
        return cls(*map(bool, flags), name.tobytes().rstrip(), told)


class PeerMaps:
    """What one rank has mapped of its peers."""

    def __init__(self, rank: int, device: int) -> None:
        """Begin with nothing.

        Args:
            rank: This rank.
            device: Its device, which is to reach what is mapped.
        """
        self._rank, self._device = rank, device
        self._opened: list[int] = []  # by CUDA IPC
        self._heaps: dict[int, Mapping] = {}  # by rank

    def exchange(self, session: Session, pointer: int) -> list[int]:
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
                library().call("enable_peer_access", self._device, ipc.device)
                return pointer
            library().call("ipc_open", self._device, byref(ipc), byref(base), byref(here))
        except CollError as error:
            raise TransportError(
                f"memory of rank {rank}'s device cannot be mapped on device "
                f"{self._device}: {error}; device_transport='nccl' does without"
            ) from error
        self._opened.append(base.value or 0)
        return here.value or 0

    def heaps(self, session: Session, heap: DeviceHeap) -> list[int] | None:
        """Map the heaps of all ranks; a collective.

        Returns:
            Where each rank's heap is mapped here, 0 where it has none yet. None if the ranks have
            agreed on CUDA IPC just now: then all heaps begin anew.
        """
        own = session.refusing(lambda: _Exported(heap))
        try:
            found = _gathered(session, own.told.pack(), _Heap.unpack)
            if not any(peer.virtual for peer in found):
                return self.exchange(session, heap.base)
            fine = all(peer.ready for peer in found) and any(
                self._agree(session, own, found, by_fabric) for by_fabric in (False, True)
            )
        finally:
            own.close()
        if not fine:
            heap.begin_anew()
            return None
        return [
            heap.base if rank == self._rank else self._heaps[rank].pointer if peer.there else 0
            for rank, peer in enumerate(found)
        ]

    def _agree(
        self, session: Session, own: _Exported, found: Sequence[_Heap], by_fabric: bool
    ) -> bool:
        """Map heaps in one of the ways, and keep that if every rank could; a collective."""
        there = {r: peer for r, peer in enumerate(found) if peer.there and r != self._rank}
        if by_fabric and not all(peer.share.has_fabric for peer in found if peer.there):
            return False
        mapped: dict[int, Mapping] = {}
        limit = min(LIMIT_S, session.config.timeout_s / 2)
        collect = partial(own.exchange, list(there.values()), len(found), limit)
        fine = session.refusing(
            lambda: self._open_all(there, None if by_fabric else collect, mapped)
        )
        fine = all(_gathered(session, np.array([[fine]], np.uint8), lambda row: bool(row[0])))
        replaced, self._heaps = (self._heaps, mapped) if fine else (mapped, self._heaps)
        for mapping in replaced.values():
            library().call("vmm_close", byref(mapping))
        return fine

    def _open_all(
        self,
        there: dict[int, _Heap],
        collect: Callable[[], list[int]] | None,
        mapped: dict[int, Mapping],
    ) -> bool:
        """Map the heaps of peers; return False where that is refused.

        Args:
            there: The heaps, by rank.
            collect: Returns their descriptors; None to do without.
            mapped: Takes what was mapped, by rank.
        """
        descriptors = [-1] * len(there)
        try:
            if collect is not None:
                descriptors = collect()
            for (rank, peer), descriptor in zip(there.items(), descriptors, strict=True):
                mapping = Mapping()
                library().call(
                    "vmm_open", self._device, byref(peer.share), descriptor, byref(mapping)
                )
                mapped[rank] = mapping
        except (CollError, OSError):
            return False
        finally:
            close_all(descriptors)
        return True

    def close(self) -> None:
        """Unmap everything."""
        for base in self._opened:
            library().call("ipc_close", self._device, base)
        for mapping in self._heaps.values():
            library().call("vmm_close", byref(mapping))
        self._opened.clear()
        self._heaps.clear()


class _Exported:
    """This rank's heap, ready to be handed to peers if it is virtual memory and they can be met."""

    def __init__(self, heap: DeviceHeap) -> None:
        self.counter: Counter | None = None
        self.descriptor, share, ready = c_int(-1), Share(), heap.virtual
        if ready:
            try:
                self.counter = Counter()
                if heap.mapping is not None:
                    ends = byref(share), byref(self.descriptor)
                    library().call("vmm_export", byref(heap.mapping), *ends)
            except (CollError, OSError):
                ready = False
        name = self.counter.name if self.counter is not None else b""
        self.told = _Heap(heap.virtual, ready, bool(heap.base), name, share)

    def exchange(self, peers: Sequence[_Heap], n: int, limit: float) -> list[int]:
        """Hand the heap to all ranks that want it, and collect descriptors of peers' heaps."""
        takers = n - 1 if self.told.there else 0
        names = [peer.name for peer in peers]
        return self.counter.exchange(self.descriptor.value, names, takers, limit)

    def close(self) -> None:
        """Close what nobody needs when all have mapped it."""
        close_all([self.descriptor.value])
        if self.counter is not None:
            self.counter.close()


def _gathered(session: Session, own: np.ndarray, unpack: Callable[[np.ndarray], _T]) -> list[_T]:
    rows = session.call(Kind.ALL_GATHER, own, None, "sum", 0, None)
    return [unpack(row) for row in rows]

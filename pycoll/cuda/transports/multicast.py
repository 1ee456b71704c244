"""A multicast object over the heaps of all ranks: sums made by the switch between devices.

It has run on no device yet, and in which order a switch adds is not stated, so that the same call
may give other bits the next time. Hence it is used only where `PYCOLL_CUDA_MULTICAST=1` asks for it
and a call for no order (``order="any"``).

The driver lets a rank that makes a step wait for those that are late, for ever. So the ranks agree
before every step that all of them have made the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from typing import NamedTuple

import numpy as np

from pycoll.cuda.device.heap import DeviceHeap
from pycoll.cuda.device.library import MULTICAST, Multicast, library
from pycoll.cuda.transports.descriptors import LIMIT_S, NAME_BYTES, Counter, close_all
from pycoll.errors import CollError
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind


class Member(NamedTuple):
    """What a rank tells before."""

    wanted: bool  # its settings ask for multicast
    supported: bool  # its device has it, and its heap is virtual memory
    nbytes: int  # of its heap, as mapped
    device: bytes  # identity of its device
    name: bytes  # of the counter at which rank 0 hands out a descriptor


def refusal(members: Sequence[Member]) -> str:
    """Return why these ranks use no multicast, "" if they do; the same on all of them."""
    if not all(m.wanted for m in members):
        return "PYCOLL_CUDA_MULTICAST=1 is not set on all ranks"
    if len(members) < 2:
        return "there is one rank"
    if not all(m.supported for m in members):
        return "a device has no multicast, or a heap that is no virtual memory"
    if len({m.device for m in members}) < len(members):
        return "ranks share a device"
    if len({m.nbytes for m in members}) > 1:
        return "heaps differ in size"
    return ""


class HeapMulticast:
    """This rank's part of a multicast object.

    Attributes:
        why: Why there is none; "" while there is one.
    """

    def __init__(self, session: Session, heap: DeviceHeap, device: bytes) -> None:
        """Make it with the other ranks, if all of them can; a collective.

        Args:
            session: The host communicator.
            heap: This rank's heap.
            device: Identity of its device.
        """
        self._session, self._heap, self._made = session, heap, Multicast()
        self._descriptor = c_int(-1)
        counter = session.refusing(_counter)
        try:
            members = self._meet(device, counter)
            self.why: str = refusal(members)
            if not self.why:
                self._make(members, counter)
        finally:
            close_all([self._descriptor.value])
            if counter is not None:
                counter.close()

    @property
    def address(self) -> int:
        """What stands for all heaps, from their beginning on; 0 if there is no multicast."""
        return self._made.pointer or 0

    def close(self) -> None:
        """Undo it; no kernel may use it any more."""
        library().call("multicast_close", byref(self._made))

    def _meet(self, device: bytes, counter: Counter | None) -> list[Member]:
        config, heap = self._session.config, self._heap
        wanted = config.cuda_multicast and counter is not None
        mapping = heap.mapping
        supported = wanted and mapping is not None
        supported = supported and bool(library().support(heap.device) & MULTICAST)
        name = counter.name if counter is not None else b""
        nbytes = mapping.nbytes if mapping is not None else 0
        flags = bytes([wanted, supported]) + nbytes.to_bytes(8, "little")
        own = np.frombuffer(flags + device + name.ljust(NAME_BYTES), np.uint8)
        found = []
        for row in self._gathered(own):
            raw = row.tobytes()
            size = int.from_bytes(raw[2:10], "little")
            where, said = raw[10:-NAME_BYTES], raw[-NAME_BYTES:].rstrip()
            found.append(Member(bool(raw[0]), bool(raw[1]), size, where, said))
        return found

    def _make(self, members: Sequence[Member], counter: Counter) -> None:
        rank, n, heap = self._session.rank, len(members), self._heap
        made, limit = byref(self._made), min(LIMIT_S, self._session.config.timeout_s / 2)

        def create() -> None:
            if rank == 0:
                ends = made, byref(self._descriptor)
                library().call("multicast_create", n, members[0].nbytes, *ends)

        def add() -> None:
            if rank == 0:
                counter.exchange(self._descriptor.value, [], n - 1, limit)
            else:
                (descriptor,) = counter.exchange(-1, [members[0].name], 0, limit)
                try:
                    library().call("multicast_open", descriptor, members[0].nbytes, made)
                finally:
                    close_all([descriptor])
            library().call("multicast_add", heap.device, made)

        def bind() -> None:
            library().call("multicast_bind", byref(heap.mapping), made)

        for step in (create, add, bind):
            if not self._all_make(step):
                self.close()
                self.why = f"a rank was refused: {step.__name__}"
                return

    def _all_make(self, step: Callable[[], None]) -> bool:
        """Make a step, and tell whether all ranks could."""

        def attempt() -> bool:
            try:
                step()
            except (CollError, OSError):
                return False
            return True

        fine = self._session.refusing(attempt)
        return all(bool(row[0]) for row in self._gathered(np.array([fine], np.uint8)))

    def _gathered(self, own: np.ndarray) -> np.ndarray:
        return self._session.call(Kind.ALL_GATHER, own.reshape(1, -1), None, "sum", 0, None)


def _counter() -> Counter | None:
    try:
        return Counter()
    except OSError:
        return None

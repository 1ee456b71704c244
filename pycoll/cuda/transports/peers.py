"""Ranks that reach each other's device memory, between processes of one host.

Every rank exports its control memory, its staging buffers and its symmetric heap, once it has one;
see `pycoll.cuda.transports.maps`. An array outside the heap goes through the staging buffers.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from typing import Any, NamedTuple

from pycoll.cuda.device import arrays
from pycoll.cuda.device.heap import DeviceHeap
from pycoll.cuda.device.library import (
    BEST,
    COPIES,
    MULTICAST_SUM,
    KernelError,
    Message,
    library,
    pointers,
)
from pycoll.cuda.transports.base import Place, Transport, kernel_failure, places, wait_for
from pycoll.cuda.transports.bound_calls import CallCache, nanoseconds
from pycoll.cuda.transports.maps import PeerMaps
from pycoll.cuda.transports.multicast import HeapMulticast
from pycoll.errors import ArgumentError, CollError, TransportError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind, Order

MAX_BLOCKS = 64  # of a rank
_CELL_BYTES = 8 << 20
# Whose plans only copy inputs into a rank's own output, on every rank.
_COPIED = {("all_gather", "direct_pull"), ("broadcast", "direct")}


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
        self.memory: DeviceHeap = DeviceHeap(
            device, heap_bytes, session.config.device_memory == "auto"
        )
        self._maps = PeerMaps(session.rank, device)
        self._rank, self._n = session.rank, session.world_size
        self._connected: list[int] | None = None  # generations as of the newest exchange
        self._wanted: list[int] = []
        self._peers: list[list[int]] = []  # control memory and staging buffers of all ranks, here
        self._control = session.control
        self._group = self._cells = self._share = 0
        self.multicast: HeapMulticast | None = None
        self._heaps: list[int] = []  # where those of all ranks are mapped here
        self._offsets: list[list[int]] = []
        self._copy_bytes = session.config.device_copy_bytes
        self._failed = False
        self._calls: CallCache | None = None

    @property
    def generation(self) -> int:
        """1 before there is a heap, then 2."""
        return 2 if self.memory.base else 1

    def set_generations(self, generations: list[int]) -> None:
        """Note which ranks have a heap."""
        self._wanted = generations

    def copies(self, spec: CallSpec) -> bool:
        """Tell whether copy engines make a call: a large one, of arrays that peers reach."""
        large = 0 < self._copy_bytes <= spec.count * spec.itemsize
        return large and spec.direct and (spec.collective, spec.algorithm.name) in _COPIED

    def offset(self, pointer: int) -> int:
        """Return where an array lies in the heap; 0 if it does not."""
        base = self.memory.base
        return pointer - base if base <= pointer < base + self.memory.nbytes else 0

    def set_offsets(self, offsets: list[list[int]]) -> None:
        """Note where in their heaps the ranks have the arrays of the next launch."""
        self._offsets = offsets

    def open(self, session: Session) -> bool:
        """Map the memory of peers that is not mapped yet; a collective.

        Returns:
            Whether the heap has begun anew, so that no array that was made lies in it any more.
        """
        if self._connected == self._wanted:
            return False
        if not self._share:
            self._share = self._most_on_one(session)
        if not self._group:
            session.refusing(lambda: self._make_group(session))
        if not self._peers:
            control = library().pointer("group_control", self._group)
            self._peers = [self._maps.exchange(session, p) for p in (control, self._cells)]
        arrays.cupy().cuda.runtime.deviceSynchronize()  # nothing runs while maps change
        heaps = self._maps.heaps(session, self.memory)
        if heaps is None:
            return True
        (controls, cells), all_have = self._peers, all(heaps)
        library().call(
            "group_connect",
            self._group,
            pointers(controls),
            pointers(heaps) if all_have else None,
            self.memory.nbytes if all_have else 0,
            pointers(cells),
            _CELL_BYTES,
        )
        if all_have:
            self._use_multicast(session)
        self._heaps = heaps
        session.call(Kind.BARRIER, None, None, "sum", 0, None)
        self._connected = self._wanted
        return False

    def _use_multicast(self, session: Session) -> None:
        """Let the switch make sums where that is asked for and can be."""
        device = bytes(library().device(self.device).uuid)
        self.multicast = HeapMulticast(session, self.memory, device)
        library().call("group_multicast", self._group, self.multicast.address or None)

    def _most_on_one(self, session: Session) -> int:
        """Return how many ranks the fullest device has; a collective.

        Raises:
            ArgumentError: If ranks of one process share a device; on every rank.
        """
        found = places(session, library().device(self.device))
        if not library().for_host:
            _check_apart(found)
        return max(Counter(place.device for place in found).values())

    def _make_group(self, session: Session) -> None:
        """Make this rank's end of the group; what was taken is freed if that fails."""
        key = zlib.crc32(repr(session.config).encode())
        form = self.device, self._rank, self._n, MAX_BLOCKS, key
        cells = library().pointer("malloc", self.device, 2 * _CELL_BYTES)
        try:
            group = library().pointer("group_peer", *form)
        except BaseException:
            library().call("free", cells)
            raise
        library().call("group_share", group, self._share)
        self._group, self._cells = group, cells
        self._calls = CallCache(group, self._n, [self._rank])

    def launch(
        self,
        spec: CallSpec,
        in_pointer: int,
        out_pointer: int,
        stream: int,
        limit: float,
        table: ChunkLayout | None = None,
    ) -> None:
        """See `Transport`."""
        capturing = bool(arrays.cupy().cuda.runtime.streamIsCapturing(stream))
        call = self._calls.find(spec, pin=capturing, table=table)
        ins, outs = pointers([in_pointer]), pointers([out_pointer])
        if self.copies(spec):
            ins, outs = (
                pointers(h + o[i] for h, o in zip(self._heaps, self._offsets, strict=True))
                for i in (0, 1)
            )
            form = 0, 0, COPIES, nanoseconds(limit), 0, stream
            return library().call("launch", call, ins, outs, *form)
        no_order = spec.direct and spec.order == Order.ANY
        method = MULTICAST_SUM if no_order and self.multicast is not None else BEST
        library().call("launch", call, ins, outs, 0, 0, method, nanoseconds(limit), 0, stream)

    PLACES = 64  # parts of messages to one rank that are not taken yet

    def check_messages(self) -> None:
        """Refuse them before the devices of all ranks are connected, which is a collective."""
        if self._connected is None:
            raise ArgumentError(
                "the devices of these ranks are not connected yet; call a collective with arrays "
                "on devices first, such as all_reduce, on all ranks"
            )

    def reaches(self, v: ArrayView) -> bool:
        """Tell whether peers can read an array where it is."""
        return bool(self._heaps) and all(self._heaps) and self.memory.holds(v)

    def parts(self, nbytes: int, slotted: bool) -> int:
        """Return how many parts a message has."""
        return library().message_parts(self._n, nbytes, slotted)

    def message(self, side: str, message: Message, stream: int, limit: float) -> None:
        """Put one side of a message, ``"send"`` or ``"receive"``, on a stream."""
        library().call(side, self._group, byref(message), 0, 0, nanoseconds(limit), stream)

    def taken(self, message: Message) -> bool:
        """Tell whether the receiver has a message of this rank."""
        found = c_int()
        library().call("message_taken", self._group, byref(message), byref(found))
        return bool(found.value)

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
        if self.multicast is not None:
            self.multicast.close()
        self._maps.close()

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

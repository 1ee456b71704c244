"""How the ranks of a communicator reach each other's devices; see `peers` and `nccl`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pycoll.cuda.device import arrays, library
from pycoll.cuda.device.heap import AnyMemory
from pycoll.cuda.device.library import DeviceInfo, KernelError
from pycoll.errors import CollError, CollTimeout, MismatchError, Revoked, TransportError
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_POLL_S = 0.0002
_NOT_READY = 600  # cudaErrorNotReady
_MESSAGES = {  # as `KernelError.instruction`, what a message waits for
    0xFFFFFFFC: "room for a message to",
    0xFFFFFFFD: "the bytes of a message from",
    0xFFFFFFFE: "a message to be received by",
}


class Transport(Protocol):
    """What a `pycoll.cuda.calls.side.DeviceSide` launches through."""

    name: str  # of the transport
    device: int  # number of this rank's device
    messages: bool  # ranks send messages; otherwise they reach each other's memory
    memory: AnyMemory  # tells which arrays peers reach
    generation: int = 0  # changes when there is new memory that peers have to map

    def prepare(self, spec: CallSpec) -> None:
        """Check what is special to this transport; local, before anything is launched."""

    def set_generations(self, generations: list[int]) -> None:
        """Note the generation of every rank's memory."""

    def copies(self, spec: CallSpec) -> bool:
        """Tell whether copy engines make a call."""
        return False

    def offset(self, pointer: int) -> int:
        """Return where an array lies in this rank's memory, as peers have to know; 0 if nowhere."""
        return 0

    def set_offsets(self, offsets: list[list[int]]) -> None:
        """Note where input and output of every rank lie, for the next launch."""

    def open(self, session: Session) -> bool:
        """Connect to the peers unless that is done; a collective.

        Returns:
            Whether peers now reach other memory than before, so that the call has to be prepared
            anew; the same on all ranks.
        """

    def check_tables(self) -> None:
        """Refuse calls whose blocks lie where a table says, if there are none; local."""

    def check_messages(self) -> None:
        """Refuse messages between two ranks, if there are none (yet); local.

        What has messages has also the methods of `peers.PeerTransport` for them.
        """

    def launch(
        self,
        spec: CallSpec,
        in_pointer: int,
        out_pointer: int,
        stream: int,
        limit: float,
        table: ChunkLayout | None = None,
    ) -> None:
        """Put a call on a stream of this rank's device, which is the current one.

        With a table the blocks lie where that says.
        """

    def error(self) -> CollError | None:
        """Return what has gone wrong in the background."""

    def wait(self, event: Any, timeout: float) -> None:
        """Wait on the host for an event."""

    def abort(self) -> None:
        """End everything that runs; harmless when nothing does."""

    def close(self) -> None:
        """Stop using what peers own, and free what they do not use."""

    def free(self) -> None:
        """Free what peers have used if all of them have closed; called after `close`."""


class Place(NamedTuple):
    """Where a rank runs."""

    process: int  # number of its process
    device: bytes  # identity of its device, alike in all processes


def places(session: Session, device: DeviceInfo) -> list[Place]:
    """Exchange where ranks run; a collective."""
    process = np.array([os.getpid()], np.int64).view(np.uint8)
    own = np.concatenate([process, np.frombuffer(bytes(device.uuid), np.uint8)])
    rows = session.call(Kind.ALL_GATHER, own.reshape(1, -1), None, "sum", 0, None)
    return [Place(int(row[:8].view(np.int64)[0]), row[8:].tobytes()) for row in rows]


def wait_for(event: Any, timeout: float, what: str) -> None:
    """Poll an event until it has happened.

    Raises:
        CollTimeout: After ``timeout`` seconds.
        TransportError: If CUDA has failed; the event will not happen.
    """
    until = time.monotonic() + timeout
    while not event.done:
        runtime = arrays.cupy().cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise TransportError(f"{what} has failed: {runtime.CUDARuntimeError(status)}")
        if time.monotonic() > until:
            raise CollTimeout(f"{what} has not ended after {timeout:g} s; it may still be running")
        time.sleep(_POLL_S)


def kernel_failure(error: KernelError) -> CollError | None:
    """Turn the record of a kernel into an error; None if it tells of none."""
    if error.kind == library.NO_ERROR:
        return None
    if error.kind == library.ABORTED:
        return Revoked(f"rank {error.rank} was aborted on the device")
    where = f"rank {error.rank}, block {error.block}, instruction {error.instruction}"
    if error.kind == library.MISMATCH:
        return MismatchError(
            f"{where}: rank {error.peer} runs another call on the device (fingerprint "
            f"{error.seen:#010x}, expected {error.expected:#010x})"
        )
    if error.instruction in _MESSAGES:
        return CollTimeout(
            f"rank {error.rank}, block {error.block}: gave up after waiting "
            f"{error.waited_ns * 1e-9:.3g} s for {_MESSAGES[error.instruction]} rank {error.peer}. "
            "Look for a rank whose device is busy with something else, or that did not receive."
        )
    return CollTimeout(
        f"{where}: gave up after waiting {error.waited_ns * 1e-9:.3g} s for rank {error.peer} "
        f"{_position(error.expected)}; it is {_position(error.seen)}; own step {error.step}. "
        "Look for a rank that has not made this call, or whose device is busy with something else."
    )


def root_cause(records: Sequence[KernelError]) -> KernelError:
    """Choose the record to show, of one for each rank: of a mismatch, or who waits for the culprit.

    Who waits for a rank that waits itself may be as far from going on as who waits for the one that
    is missing, which has no record. Of several, that whose peer is furthest behind, modulo 2**32.
    """
    failed = {e.rank: e for e in records if e.kind != library.NO_ERROR}
    for kind in (library.MISMATCH, library.ABORTED):
        for record in failed.values():
            if record.kind == kind:
                return record
    waits = {rank: e for rank, e in failed.items() if e.peer != rank}
    return max(
        waits.values(),
        key=lambda e: (e.peer not in failed, e.peer not in waits, (e.expected - e.seen) % 2**32),
        default=records[0],
    )


def _position(value: int) -> str:
    return f"at step {value & 0xFFFF} of call {value >> 16}"

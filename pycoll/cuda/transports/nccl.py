"""NCCL as a transport: schedules over its point-to-point messages with our folds, or its own."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np

from pycoll.config import environment
from pycoll.cuda.device import arrays
from pycoll.cuda.device.heap import NoMemory
from pycoll.cuda.device.library import MAX_RANKS, library
from pycoll.cuda.transports.base import Transport, places, wait_for
from pycoll.cuda.transports.bound_calls import element_type, extent_of
from pycoll.cuda.transports.nccl_bindings import (
    NATIVE,
    UNIQUE_ID_BYTES,
    find_binding,
    native_arguments,
)
from pycoll.cuda.transports.program import DeviceFold, Program, execute, lower
from pycoll.errors import ArgumentError, CollError, CollTimeout, TransportError
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.calls.plans import CallSpec, compile_plans
from pycoll.runtime.sessions.session import Session
from pycoll.types import DType, Kind

MULTI_RANK_SINCE = 23000  # NCCL_MULTI_RANK_GPU_ENABLE
_MAX_PROGRAMS = 1024


class NcclTransport(Transport):
    """NCCL between devices, on one host or many; see `pycoll.cuda.transports.base.Transport`."""

    name = "NCCL"
    messages = True

    def __init__(self, session: Session, device: int) -> None:
        """Find a binding; nothing is sent.

        Raises:
            CudaUnavailable: If there is none, or no device library for the folds.
        """
        self.device = device
        self.memory: NoMemory = NoMemory()
        self._binding = find_binding()
        library().call("preload", device)
        self._rank, self._n = session.rank, session.world_size
        self._comm: Any = None
        self._programs: dict[CallSpec, Program] = {}
        self._scratch: Any = None
        self._dead = ""

    def prepare(self, spec: CallSpec) -> None:
        """Compile the program, and refuse what NCCL or the folds cannot do."""
        if spec.algorithm.name == NATIVE:
            _native_arguments(spec)
        elif spec not in self._programs:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            self._programs[spec] = self._compile(spec)

    def _compile(self, spec: CallSpec) -> Program:
        (plan,), _ = compile_plans(spec, self._n, [self._rank], messages=True)
        program = lower(plan, extent_of(spec, plan, self._n))
        widest = max((len(s.srcs) for s in program.steps if isinstance(s, DeviceFold)), default=0)
        if widest > MAX_RANKS:
            raise ArgumentError(
                f"{spec.algorithm.name} combines {widest} arrays at once, at most {MAX_RANKS} are "
                "possible on a device; name another algorithm, such as 'halving_doubling'"
            )
        return program

    def open(self, session: Session) -> bool:
        """Make the NCCL communicator; the unique id goes through the host communicator."""
        if self._comm is not None or self._n == 1:
            return False
        self._share_device(session)
        key = np.zeros(UNIQUE_ID_BYTES, np.uint8)
        if self._rank == 0:
            made = session.refusing(self._binding.unique_id)
            key[: len(made)] = np.frombuffer(made, np.uint8)
        key = session.call(Kind.BROADCAST, key, None, "sum", 0, None)
        with arrays.cupy().cuda.Device(self.device):
            self._comm = self._binding(self._n, self._rank, key.tobytes())
        return False

    def _share_device(self, session: Session) -> None:
        """Tell NCCL when ranks share a device; it refuses to start otherwise."""
        devices = [place.device for place in places(session, library().device(self.device))]
        ranks = devices.count(devices[self._rank])
        share_device(environment(), ranks, self._binding.version(), self._rank)

    def check_tables(self) -> None:
        """Refuse them: messages carry whole chunks of one size."""
        raise ArgumentError(
            "v-variants of arrays on devices need device_transport='cuda'; NCCL's messages carry "
            "chunks of one size"
        )

    def check_messages(self) -> None:
        """Refuse them: NCCL's have no tags, and their order would be that of collectives."""
        raise ArgumentError("send and recv of arrays on devices need device_transport='cuda'")

    def launch(
        self,
        spec: CallSpec,
        in_pointer: int,
        out_pointer: int,
        stream: int,
        limit: float,
        table: ChunkLayout | None = None,
    ) -> None:
        """See `Transport`; NCCL has no time limits of its own."""
        if spec.algorithm.name == NATIVE:
            return self._launch_native(spec, in_pointer, out_pointer, stream)
        program = self._programs[spec]
        regions = in_pointer, out_pointer, self._room(program.scratch_bytes)
        dtype = element_type(spec, DType.UINT8)
        execute(program, regions, self._comm, library(), dtype, spec.op, stream)

    def _launch_native(self, spec: CallSpec, source: int, target: int, stream: int) -> None:
        code, scale, more = _native_arguments(spec)
        whole = spec.kind in (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
        count = (spec.count if whole else spec.count // self._n) * scale
        if self._n == 1:
            library().copy(target, source, spec.count * spec.itemsize, stream)
        elif count:
            self._comm.native(spec.kind, (source, target), count, code, more, stream)

    def _room(self, nbytes: int) -> int:
        """Return scratch memory; a larger one replaces it when the device has done all its work."""
        if not nbytes:
            return 0
        if self._scratch is None or self._scratch.nbytes < nbytes:
            cupy = arrays.cupy()
            if self._scratch is not None:
                cupy.cuda.runtime.deviceSynchronize()
            self._scratch = cupy.empty(nbytes, cupy.uint8)
        return int(self._scratch.data.ptr)

    def error(self) -> CollError | None:
        """See `Transport`."""
        text = self._dead or (self._comm.error() if self._comm is not None else "")
        if not text:
            return None
        self.abort()
        self._dead = text
        return TransportError(f"NCCL failed in the background: {text}")

    def wait(self, event: Any, timeout: float) -> None:
        """See `Transport`; a time-out ends the NCCL communicator, which cannot be used any more."""
        try:
            wait_for(event, timeout, "the messages of NCCL")
        except CollTimeout as error:
            self._dead = self._dead or str(error)
            self.abort()
            raise

    def abort(self) -> None:
        """See `Transport`."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._dead = self._dead or "it was aborted"
            comm.abort()

    def close(self) -> None:
        """See `Transport`."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()
        self._programs.clear()
        self._scratch = None


def _native_arguments(spec: CallSpec) -> tuple[int, int, tuple[int, ...]]:
    return native_arguments(spec.kind, element_type(spec), spec.op, spec.root, spec.itemsize)


def share_device(environ: MutableMapping[str, str], ranks: int, version: int, rank: int) -> None:
    """Set what NCCL needs where several ranks share a device, unless the user has.

    Since 2.30 it allows them when asked to, one process each. Before, it only takes ranks that look
    like different hosts, and connects them by sockets: right, but slow.

    Args:
        environ: Environment of the process, read by NCCL when it starts.
        ranks: Ranks on this rank's device.
        version: Of NCCL, such as 23203.
        rank: This rank.
    """
    if ranks < 2:
        return
    if version >= MULTI_RANK_SINCE:
        environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        environ.setdefault("NCCL_MAX_CTAS", str(max(1, 16 // ranks)))
    else:
        environ.setdefault("NCCL_HOSTID", f"pycoll-rank-{rank}")
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

"""One rank's side of calls on device arrays: agreement by the host, then a launch on a stream.

The ranks of a call first compare it through the host communicator, which takes microseconds, and
only then launch. So a call that does not match, a refusal and a dead peer are errors on every rank
before anything runs on a device; what the device does afterwards is asynchronous.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from pycoll import _C
from pycoll.config import check_timeout
from pycoll.cuda.calls.in_order import LaunchOrder
from pycoll.cuda.calls.made_before import MadeBefore
from pycoll.cuda.calls.messages import DeviceMessages, MessageState
from pycoll.cuda.calls.norm import NormCall
from pycoll.cuda.calls.prepare import DeviceCaller, DevicePlans, number_of
from pycoll.cuda.calls.ragged import DeviceRows
from pycoll.cuda.calls.times import DeviceTimes
from pycoll.cuda.calls.virtual import VirtualRanks
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import library
from pycoll.cuda.transports.base import Transport
from pycoll.cuda.transports.nccl import NcclTransport
from pycoll.cuda.transports.peers import PeerTransport
from pycoll.errors import ArgumentError, CollError, CollTimeout, MismatchError
from pycoll.runtime.arrays.host_arrays import ArrayView
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.calls.descriptors import FIELDS, Call
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.sessions.message_session import MpiSession
from pycoll.runtime.sessions.reports import PLANS
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind


def open_side(session: Session) -> DeviceSide:
    """Make this rank's side of calls on device arrays; local, nothing is sent.

    The device is the one that is current when it is made.

    Raises:
        CudaUnavailable: With what is missing, and what to do.
        ArgumentError: If the transport that was asked for cannot serve these ranks.
    """
    library().device_count()
    device = int(arrays.cupy().cuda.Device().id)
    wanted = session.config.device_transport
    on_one_host = not isinstance(session, MpiSession)
    if wanted == "cuda" and not on_one_host:
        raise ArgumentError(
            "device_transport='cuda' is for ranks that share the memory of one host; "
            "these send messages, so use 'nccl'"
        )
    if wanted == "nccl" or not on_one_host:
        return DeviceSide(session, NcclTransport(session, device))
    return DeviceSide(session, PeerTransport(session, device, session.config.device_heap_bytes))


class DeviceSide:
    """Calls of one rank of a communicator on the arrays of one device."""

    def __init__(self, session: Session, transport: Transport) -> None:
        """Use a transport, which is opened by the first call of all ranks.

        Args:
            session: The host communicator.
            transport: How the ranks reach each other's devices.
        """
        self._session = session
        self.transport = transport
        self._cupy = arrays.cupy()
        self._number_of = lru_cache(maxsize=64)(number_of)
        self._launches = LaunchOrder()
        self._made = MadeBefore()
        self._comparison: Prepared | None = None  # what `_agree` runs
        self._background: Any = None  # stream of calls with async_op
        self._messages = MessageState(session.world_size)
        self.times: DeviceTimes = DeviceTimes(session, transport.device)
        self.failure: CollError | None = None

    def call(
        self,
        request: CallRequest,
        x: Any,
        out: Any,
        timeout: float | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        """Run a collective; see `pycoll.Communicator`."""
        session = self._session
        prepared, number, handle = session.refusing(
            lambda: self._prepare(request, x, out, timeout, stream)
        )
        self._agree(prepared, number, timeout)
        if self.transport.open(session):  # arrays lie elsewhere than was thought
            return self.call(request, x, out, timeout, async_op, stream)
        limit = check_timeout(session.config.timeout_s if timeout is None else timeout)
        capturing = self._launches.capturing(handle)
        with self._cupy.cuda.Device(self.transport.device):
            event = self._launch(prepared, handle, limit, async_op, capturing)
        if async_op:
            return DeviceWork(self, prepared, event)
        if stream is None and not capturing and not arrays.is_cupy(out if x is None else x):
            self.synchronize(event, limit)  # the stream on which it will be used is unknown
        return prepared.result

    def _prepare(
        self, request: CallRequest, x: Any, out: Any, timeout: float | None, stream: Any
    ) -> tuple[Prepared, int, int]:
        """Find everything that can be wrong with the arguments; nothing is sent or launched.

        Returns:
            The call, the number of its algorithm, and the stream.
        """
        if timeout is not None:
            check_timeout(timeout)
        self.check()
        handle = arrays.stream_of(stream)
        place = self.transport.memory.base  # what lies there is reached directly
        key = None if out is None else self._made.key(request, handle, x, out, place)
        known = self._made.find(key, (x, out), (out,))
        if known is not None:
            (prepared,), number = known
            self.transport.prepare(prepared.spec)
            return prepared, number, handle
        plans = DevicePlans(self._session.rank, self._session.world_size, self.transport.messages)
        copy_bytes = self._session.config.device_copy_bytes
        where = self.transport.memory, self.transport.device, handle
        caller = DeviceCaller(plans, *where, copy_bytes=copy_bytes)
        prepared = caller.prepare(request, x, out)
        self.transport.prepare(prepared.spec)
        spec = prepared.spec  # the arrays do not matter: one proof for all
        what = spec.kind, spec.collective, spec.algorithm, spec.params, spec.direct
        bare = CallSpec(*what, dtype=0, itemsize=1, count=0)
        number = self._number_of(bare, plans.world_size, self.transport.messages)
        if prepared.result is out:
            self._made.note(key, [prepared], number)
        return prepared, number, handle

    def messages(self, stream: Any) -> DeviceMessages:
        """Return what sends and receives arrays on a stream."""
        return DeviceMessages(self, self._session, self._messages, stream)

    def rows(self) -> DeviceRows:
        """Return what a v-variant does with arrays on this device."""
        return DeviceRows(self)

    def look(self, x: Any, what: str, stream: int) -> ArrayView:
        """Look at an array, which has to be on the device of this rank."""
        plans = DevicePlans(self._session.rank, self._session.world_size, self.transport.messages)
        where = self.transport.memory, self.transport.device, stream
        return DeviceCaller(plans, *where).view(x, what)

    def call_table(self, prepared: Prepared, table: ChunkLayout, stream: int, limit: float) -> None:
        """Run a call whose blocks lie where a table says, which all ranks know.

        Raises:
            ArgumentError: If the transport cannot.
        """
        session, spec = self._session, prepared.spec
        session.refusing(self.transport.check_tables)
        self._agree(prepared, number_of(spec, session.world_size, False), limit)
        while self.transport.open(session):  # no array has to lie in the heap
            pass
        capturing = self._launches.capturing(stream)
        with self._cupy.cuda.Device(self.transport.device):
            self._launch(prepared, stream, limit, False, capturing, table)

    def wait_for_last(self, limit: float) -> None:
        """Wait on the host until the newest launch has ended."""
        if self._launches.last is not None:
            self.synchronize(self._launches.last, limit)

    def _agree(self, prepared: Prepared, number: int, timeout: float | None) -> None:
        """Compare the call with those of all ranks.

        Raises:
            MismatchError: If they differ; nothing was launched and the communicator stays usable.
        """
        spec = prepared.spec
        word = spec.descriptor(number, spec.direct)
        how = number >> 16 | self.transport.copies(spec) << 62
        offsets = map(self.transport.offset, (prepared.in_ptr, prepared.out_ptr))
        own = np.array([word, spec.count, how, self.transport.generation, *offsets], np.uint64)
        rows = self._gather(own, timeout).view(np.uint64)
        if (rows[:, :3] != rows[0, :3]).any():
            raise MismatchError(_difference(rows.tolist()))
        self.transport.set_generations(rows[:, 3].tolist())
        self.transport.set_offsets(rows[:, 4:].tolist())

    def _gather(self, words: np.ndarray, timeout: float | None) -> np.ndarray:
        """Gather a row of every rank: an all_gather of the host that is prepared once.

        Its arrays are never in symmetric memory, where NumPy may put others, and every call is
        the same one, so that all ranks make it alike whatever some of them have been refused.
        """
        session = self._session
        own = np.frombuffer(bytearray(words.tobytes()), np.int64).reshape(1, -1)
        rows = np.frombuffer(bytearray(session.world_size * own.nbytes), np.int64)
        rows = rows.reshape(session.world_size, -1)
        if self._comparison is None:
            request = CallRequest(Kind.ALL_GATHER)
            self._comparison = session.refusing(lambda: session.prepare(request, own, rows))
        known, ends = self._comparison, (_C.address(own), _C.address(rows))
        prepared = Prepared(known.binding, *ends, rows, (own, rows), spec=known.spec)
        prepared.two_levels = known.two_levels
        limit = session.config.timeout_s if timeout is None else timeout
        return session.start(prepared, limit, False)

    def _launch(
        self,
        prepared: Prepared,
        handle: int,
        limit: float,
        async_op: bool,
        capturing: bool,
        table: ChunkLayout | None = None,
    ) -> Any:
        """Put the call on its stream, behind everything that has been launched before it."""
        stream = handle
        if async_op and not capturing:
            if self._background is None:
                self._background = self._cupy.cuda.Stream(non_blocking=True)
            stream = self._background.ptr
            arrays.order(stream, handle)

        def launch() -> None:
            ends = prepared.in_ptr, prepared.out_ptr
            self.transport.launch(prepared.spec, *ends, stream, limit, table)
            for detour in prepared.scatters:
                detour.scatter(stream)

        timed = partial(self.times.run, launch, partial(_named, prepared.spec), stream, capturing)
        return self._launches.put([prepared], stream, capturing, timed)

    def check(self) -> None:
        """Raise what has gone wrong on the device since the last look.

        Raises:
            CollError: That of the failed call; again with every later call.
        """
        if self.failure is None:
            self.failure = self.transport.error()
            if self.failure is not None:
                self._session.abort(str(self.failure))
        if self.failure is not None:
            raise self.failure

    def synchronize(self, event: Any, timeout: float) -> None:
        """Wait on the host until a launch has ended.

        Raises:
            CollTimeout: If that takes longer.
            CollError: If it failed.
        """
        self.transport.wait(event, timeout)
        self._launches.sweep()
        self.check()

    @cached_property
    def _alone(self) -> VirtualRanks:
        """One rank on this device, whose kernels work on what collectives have made."""
        return VirtualRanks(1, self.transport.device)

    def check_norm(
        self,
        x: Any,
        weight: Any,
        residual: Any,
        eps: float,
        out: Any,
        residual_out: Any,
        order: str | None,
        stream: Any,
    ) -> None:
        """Find everything that can be wrong with `Communicator.all_reduce_rms_norm`."""
        self.check()
        where = self.transport.device, arrays.stream_of(stream)
        NormCall(*where, weight, [x], [residual], [out], [residual_out], eps, order, None)
        _ = self._alone  # made before anything is launched

    def normalise(
        self, s: Any, weight: Any, residual: Any, eps: float, residual_out: Any, stream: Any
    ) -> Any:
        """Put the rest behind the sum, in its place; see `Communicator.all_reduce_rms_norm`."""
        more = residual if residual is None else [residual]
        kept = residual_out if residual_out is None else [residual_out]
        made = self._alone.all_reduce_rms_norm(
            [s], weight, more, eps, out=[s], residual_out=kept, stream=stream
        )
        if stream is None and not arrays.is_cupy(s):
            self._alone.synchronize()  # the stream on which it will be used is unknown
        return s if residual is None else (s, made[1][0])

    def empty(self, shape: Any, dtype: Any, device: str) -> Any:
        """See `pycoll.Communicator.empty`."""
        if device not in ("cuda", f"cuda:{self.transport.device}"):
            raise ArgumentError(
                f"device={device!r}; this communicator uses 'cuda:{self.transport.device}'"
            )
        self._launches.sweep()
        with self._cupy.cuda.Device(self.transport.device):
            return self.transport.memory.empty(shape, dtype)

    def abort(self) -> None:
        """End everything that runs."""
        self.transport.abort()

    def close(self) -> None:
        """Wait for everything that was launched and free what the device side has."""
        last = [] if self._launches.last is None else [self._launches.last]
        last += [event for event, _ in self._messages.held]
        try:
            for event in last if self.failure is None else ():
                self.transport.wait(event, self._session.config.timeout_s)
        except CollTimeout:
            self.transport.abort()
        self.times.drain()
        self._launches.clear()
        self._messages.held.clear()
        self._messages.unsettled.clear()
        if "_alone" in vars(self):
            self._alone.close()
        self.transport.close()

    def free(self) -> None:
        """Free what peers have used, when the host communicator is closed; see `Transport`."""
        self.transport.free()


class DeviceWork:
    """A call under way on a device; its arrays are kept alive until it has ended."""

    def __init__(self, side: DeviceSide, prepared: Prepared, event: Any) -> None:
        self._side, self._prepared, self._event = side, prepared, event

    def done(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return bool(self._event.done)

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        """Make a stream wait for it; the host does not wait.

        Args:
            timeout: Not used: no time passes here. See `synchronize`.
            stream: The stream; by default the current one of CuPy.

        Returns:
            What the blocking call would have returned, ready for use on that stream.

        Raises:
            CollError: If a launch of this communicator is known to have failed.
        """
        del timeout
        self._side.check()
        arrays.cupy().cuda.runtime.streamWaitEvent(arrays.stream_of(stream), self._event.ptr)
        return self._prepared.result

    def synchronize(self, timeout: float = 300.0) -> Any:
        """Wait on the host until it has ended.

        Args:
            timeout: Seconds.

        Returns:
            What the blocking call would have returned.

        Raises:
            CollTimeout: If it is not done in time.
            CollError: If it failed; the text says which rank waited for which, and at which step.
        """
        self._side.synchronize(self._event, timeout)
        return self._prepared.result


def _named(spec: CallSpec) -> tuple[str, int]:
    """Return what a trace calls a call, and its bytes."""
    what = Call.unpack(spec.descriptor(0, spec.direct), spec.count)
    return f"{what.kind} {what.dtype}[{spec.count}]", spec.count * spec.itemsize


def _difference(rows: list[list[int]]) -> str:
    calls = [Call.unpack(word, count) for word, count, *_ in rows]
    fields = [f for f in FIELDS if len({getattr(c, f) for c in calls}) > 1]
    first = (
        f"ranks called different things on device arrays; field '{(fields or [PLANS])[0]}' "
        "differs; nothing was launched"
    )
    return "\n".join([first, *(f"  rank {rank}: {call}" for rank, call in enumerate(calls))])

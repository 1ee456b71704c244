"""One rank's side of calls on device arrays: agreement by the host, then a launch on a stream.

The ranks of a call first compare it through the host communicator, which takes microseconds, and
only then launch. So a call that does not match, a refusal and a dead peer are errors on every rank
before anything runs on a device; what the device does afterwards is asynchronous.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.config import check_timeout
from pycoll.cuda.calls.prepare import DeviceCaller, DevicePlans, number_of
from pycoll.cuda.calls.work import DeviceWork
from pycoll.cuda.device import arrays
from pycoll.errors import ArgumentError, CollError, CollTimeout, MismatchError
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.runtime.sessions.reports import FIELDS, PLANS, Call
from pycoll.types import Kind

if TYPE_CHECKING:
    from pycoll.cuda.transports.links import Link
    from pycoll.runtime.sessions.session import Session


class DeviceSide:
    """Calls of one rank of a communicator on the arrays of one device."""

    def __init__(self, session: Session, link: Link) -> None:
        """Use a link, which is opened by the first call of all ranks.

        Args:
            session: The host communicator.
            link: How the ranks reach each other's devices.
        """
        self._session, self.link = session, link
        self._cupy = arrays.cupy()
        self._number_of = lru_cache(maxsize=64)(number_of)
        self._pending: deque[tuple[Any, Prepared]] = deque()
        self._captured: list[Prepared] = []
        self._last: Any = None  # end of the newest launch
        self._background: Any = None  # stream of calls with async_op
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
        self.link.open(session)
        limit = check_timeout(session.config.timeout_s if timeout is None else timeout)
        capturing = self._capturing(handle)
        with self._cupy.cuda.Device(self.link.device):
            event = self._launch(prepared, handle, limit, async_op, capturing)
        if async_op:
            return DeviceWork(self, prepared, event)
        if stream is None and not capturing and not self._is_cupy(x, out):
            self.synchronize(event, limit)  # nobody knows on which stream it will be used
        return prepared.result

    def _is_cupy(self, x: Any, out: Any) -> bool:
        return arrays.is_cupy(x if x is not None else out)

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
        plans = DevicePlans(self._session.rank, self._session.world_size, self.link.messages)
        caller = DeviceCaller(plans, self.link.memory, self.link.device, handle)
        prepared = caller.prepare(request, x, out)
        self.link.prepare(prepared.spec)
        spec = prepared.spec  # of which arrays do not matter: one proof for all
        bare = CallSpec(
            spec.kind, spec.collective, spec.algorithm, spec.params, spec.direct, 0, 1, 0
        )
        number = self._number_of(bare, plans.world_size, self.link.messages)
        return prepared, number, handle

    def _agree(self, prepared: Prepared, number: int, timeout: float | None) -> None:
        """Compare the call with those of all ranks.

        Raises:
            MismatchError: If they differ; nothing was launched and the communicator stays usable.
        """
        spec, session = prepared.spec, self._session
        word = spec.descriptor(number, spec.direct)
        own = np.array([word, spec.count, number >> 16, self.link.generation], np.uint64)
        own = own.view(np.int64).reshape(1, -1)
        rows = session.call(Kind.ALL_GATHER, own, None, "sum", 0, None, timeout=timeout)
        rows = rows.view(np.uint64)
        if (rows[:, :3] != rows[0, :3]).any():
            raise MismatchError(_difference(rows.tolist()))
        self.link.heard(rows[:, 3].tolist())

    def _launch(
        self, prepared: Prepared, handle: int, limit: float, async_op: bool, capturing: bool
    ) -> Any:
        """Put the call on its stream, behind everything that has been launched before it."""
        stream = handle
        if async_op and not capturing:
            if self._background is None:
                self._background = self._cupy.cuda.Stream(non_blocking=True)
            stream = self._background.ptr
            arrays.order(stream, handle)
        if self._last is not None and not capturing:  # on whatever stream: handles come again
            self._cupy.cuda.runtime.streamWaitEvent(stream, self._last.ptr)
        self.link.launch(prepared.spec, prepared.in_ptr, prepared.out_ptr, stream, limit)
        for detour in prepared.scatters:
            detour.scatter(stream)
        event = self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.runtime.eventRecord(event.ptr, stream)
        if not capturing:
            self._last = event
            self._sweep()
            self._pending.append((event, prepared))
        elif prepared.gathers or prepared.scatters:
            self._captured.append(prepared)  # the graph uses arrays that nobody else keeps
        return event

    def _sweep(self) -> None:
        while self._pending and self._pending[0][0].done:
            self._pending.popleft()

    def _capturing(self, handle: int) -> bool:
        return bool(self._cupy.cuda.runtime.streamIsCapturing(handle))

    def check(self) -> None:
        """Raise what has gone wrong on the device since the last look.

        Raises:
            CollError: That of the failed call; again with every later call.
        """
        if self.failure is None:
            self.failure = self.link.error()
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
        self.link.wait(event, timeout)
        self._sweep()
        self.check()

    def empty(self, shape: Any, dtype: Any, device: str) -> Any:
        """See `pycoll.Communicator.empty`."""
        if device not in ("cuda", f"cuda:{self.link.device}"):
            raise ArgumentError(
                f"device={device!r}; this communicator uses 'cuda:{self.link.device}'"
            )
        self._sweep()
        with self._cupy.cuda.Device(self.link.device):
            return self.link.memory.empty(shape, dtype)

    def abort(self) -> None:
        """End everything that runs."""
        self.link.abort()

    def close(self) -> None:
        """Wait for everything that was launched and free what the device side has."""
        if self._last is not None and self.failure is None:
            try:
                self.link.wait(self._last, self._session.config.timeout_s)
            except CollTimeout:
                self.link.abort()
        self._pending.clear()
        self._captured.clear()
        self.link.close()

    def free(self) -> None:
        """Free what peers have used, when the host communicator is closed; see `Link`."""
        self.link.free()


def _difference(rows: list[list[int]]) -> str:
    calls = [Call.unpack(word, count) for word, count, *_ in rows]
    fields = [f for f in FIELDS if len({getattr(c, f) for c in calls}) > 1]
    lines = [f"  rank {rank}: {call}" for rank, call in enumerate(calls)]
    return "\n".join(
        [
            f"ranks called different things on device arrays; field '{(fields or [PLANS])[0]}' "
            "differs; nothing was launched",
            *lines,
        ]
    )

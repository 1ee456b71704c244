"""Tensors on CUDA devices: how they reach the device side of a session, and its streams.

A synchronous call goes on the current stream of the calling thread. A call in the background goes
on a stream of the group, behind what the caller's stream had to do when the call was made, and
whoever waits for it makes his own stream wait: the host never does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import cuda

from pycoll.cuda import open_device
from pycoll.torch.tensors.blocks import as_bytes
from pycoll.torch.tensors.layout import DTYPES, apart, as_reducible
from pycoll.types import Kind, ReduceOp

if TYPE_CHECKING:
    from pycoll.runtime.sessions.session import Session

_IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)


def kinds() -> list[str]:
    """Return the kinds of devices whose tensors this PyTorch can hand to pycoll."""
    return ["cpu", "cuda"] if torch.version.cuda else ["cpu"]


class Fence:
    """The place of a call in the background among the work of a device.

    Attributes:
        device: Where the tensors of the call are.
        stream: On which it runs.
    """

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note what the current stream has to do before the call; it may use it until then."""
        self.device, self.stream = tensor.device, stream
        self._before = cuda.current_stream(self.device).record_event()
        self._after: Any = None

    def around(self, job: Callable[[], Any]) -> Callable[[], None]:
        """Return the call with its place."""

        def placed() -> None:
            with cuda.stream(self.stream):
                self.stream.wait_event(self._before)
                job()
                self._after = self.stream.record_event()

        return placed

    def join(self) -> None:
        """Make the current stream wait for the call, which has been launched."""
        cuda.current_stream(self.device).wait_event(self._after)

    def passed(self) -> bool:
        """Tell whether the device has done the call, if it was launched at all."""
        return self._after is None or bool(self._after.query())

    def deliver(self, promise: torch.futures.Future, tensors: list[torch.Tensor]) -> None:
        """Complete a future with the result; callbacks run on streams that wait for the call."""
        with cuda.stream(self.stream):
            promise.set_result(tensors)


class DeviceCalls:
    """The collectives of a session on contiguous tensors of a CUDA device."""

    def __init__(self, session: Session) -> None:
        """Serve a session; nothing of CUDA is touched before the first call."""
        self._session = session
        self._streams: dict[torch.device, Any] = {}
        session.open_device = open_device

    def fence(self, tensors: list[torch.Tensor]) -> Fence | None:
        """Return the place of a call that is to run in the background; None on the host."""
        if not tensors or tensors[0].is_cpu:
            return None
        device = tensors[0].device
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        return Fence(tensors[0], self._streams[device])

    def reduce(
        self,
        kind: Kind,
        x: torch.Tensor,
        out: torch.Tensor | None,
        op: ReduceOp,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        """Combine the tensors of all ranks; see `pycoll.torch.calls.prepare.Calls.reduce`."""
        y = None if out is None else as_reducible(out, op)[0]
        x, _, op = as_reducible(x, op)
        self._call(kind, x, y, op.name.lower(), root, site, timeout_s)

    def move(
        self,
        kind: Kind,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        count: int,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        """Move elements between ranks; see `pycoll.torch.calls.prepare.Calls.move`."""
        del count  # the shapes tell
        if kind == Kind.BROADCAST:
            x = out  # which tells the others what comes
        self._call(kind, _plain(x), _plain(out), "sum", root, site, timeout_s)

    def _call(
        self,
        kind: Kind,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        op: str,
        root: int,
        site: int,
        timeout_s: float,
    ) -> None:
        session, given = self._session, out if x is None else x
        session.place = site
        if x is not None and kind not in _IN_PLACE:
            x = session.refusing(lambda: apart(x, out, None))
        flat = (None if t is None else t.view(-1) for t in (x, out))
        with cuda.device(given.device):
            stream = cuda.current_stream().cuda_stream
            session.call(kind, *flat, op, root, None, timeout=timeout_s, stream=stream)

    def drain(self) -> None:
        """Wait until the device has done all calls; at once if there were none."""
        side = self._session.device
        if side is not None:
            cuda.synchronize(side.transport.device)
            self._session.guard(side.check)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor as bytes if its type is none that pycoll counts with."""
    if tensor is None or tensor.dtype in DTYPES:
        return tensor
    return as_bytes(tensor)


@contextlib.contextmanager
def on_host(x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give input and output of a call that only the host can make: copies of those of a device."""
    if out.is_cpu:
        yield x.cpu(), out
        return
    box = torch.empty(out.shape, dtype=out.dtype, device="cpu")
    yield x.cpu(), box
    out.copy_(box)

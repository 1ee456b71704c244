"""Tensors on CUDA devices: how the device side of a session gets them, and its streams.

A synchronous call goes on the current stream of the calling thread. An asynchronous one goes on a
stream of the group, after what the caller's stream had to do when the call was made; its ``wait``
makes the current stream wait, never the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import cuda

from pycoll.cuda import open_device
from pycoll.runtime.sessions.session import Session
from pycoll.torch.tensors.layout import (
    DTYPES,
    IN_PLACE,
    Request,
    apart,
    as_bytes,
    as_reducible,
)
from pycoll.types import Kind

_LATER = (torch.float8_e4m3fn, torch.float8_e5m2)  # DLPack of PyTorch 2.8 has them not


def kinds() -> list[str]:
    """Return the kinds of devices of tensors that this PyTorch has and pycoll moves."""
    return ["cpu", "cuda"] if torch.version.cuda else ["cpu"]


class Fence:
    """Orders an asynchronous call on a stream of the group against the caller's streams."""

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note what the current stream has to do before the call."""
        self.device: Any = tensor.device
        self.stream = stream
        self._before = cuda.current_stream(self.device).record_event()
        self._after: Any = None

    def around(self, job: Callable[[], Any]) -> Callable[[], None]:
        """Return the call on its stream."""

        def ordered() -> None:
            with cuda.stream(self.stream):
                self.stream.wait_event(self._before)
                job()
                self._after = self.stream.record_event()

        return ordered

    def join(self) -> None:
        """Make the current stream wait for the call, which has been launched."""
        cuda.current_stream(self.device).wait_event(self._after)

    def passed(self) -> bool:
        """Tell whether the device has done the call, if it was launched at all."""
        return self._after is None or bool(self._after.query())

    def deliver(self, promise: torch.futures.Future[Any], tensors: list[torch.Tensor]) -> None:
        """Complete a future with the result; callbacks run on streams that wait for the call."""
        with cuda.stream(self.stream):
            promise.set_result(tensors)


class DeviceCalls:
    """The collectives of a session on contiguous tensors of a CUDA device."""

    def __init__(self, session: Session, order: str = "tree") -> None:
        """Serve a session; nothing of CUDA is touched before the first call."""
        self._session, self._order = session, order
        self._streams: dict[torch.device, Any] = {}
        session.open_device = open_device

    def fence(self, tensors: list[torch.Tensor]) -> Fence | None:
        """Return the fence of an asynchronous call; None on the host."""
        if not tensors or tensors[0].is_cpu:
            return None
        device = tensors[0].device
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        return Fence(tensors[0], self._streams[device])

    def run(self, request: Request, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Make a collective call; see `pycoll.torch.calls.prepare.Calls.run`."""
        session, given, op = self._session, out if x is None else x, "sum"
        order = None if request.op is None else self._order
        if request.op is not None:
            out = None if out is None else as_reducible(out, request.op)[0]
            x, _, combine = as_reducible(x, request.op)
            op = combine.name.lower()
        else:
            if request.kind == Kind.BROADCAST:
                x = out  # which says to the others what comes
            x, out = _plain(x), _plain(out)
        session.call_site = request.site
        if x is not None and request.kind not in IN_PLACE:
            x = session.refusing(lambda: apart(x, out, None))
        flat = (None if t is None else t.view(-1) for t in (x, out))
        with cuda.device(given.device):
            stream = cuda.current_stream().cuda_stream
            limit = request.timeout_s
            how = op, request.root, order
            session.call(request.kind, *flat, *how, timeout=limit, stream=stream)

    def drain(self) -> None:
        """Wait until the device has done all calls; at once if there were none."""
        side = self._session.device
        if side is not None:
            cuda.synchronize(side.transport.device)
            self._session.guard(side.check)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor as bytes unless pycoll has its type, and DLPack of every PyTorch."""
    if tensor is None or (tensor.dtype in DTYPES and tensor.dtype not in _LATER):
        return tensor
    return as_bytes(tensor)


@contextlib.contextmanager
def on_host(x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give input and output of a call that only the host can make: copies of device tensors."""
    if out.is_cpu:
        yield x.cpu(), out
        return
    buffer = torch.empty(out.shape, dtype=out.dtype, device="cpu")
    yield x.cpu(), buffer
    out.copy_(buffer)

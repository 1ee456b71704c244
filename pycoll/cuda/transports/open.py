"""Choosing how the ranks of a communicator reach each other's devices."""

from __future__ import annotations

from pycoll.cuda.calls.side import DeviceSide
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import library
from pycoll.cuda.transports.nccl import NcclLink
from pycoll.cuda.transports.peers import PeerLink
from pycoll.errors import ArgumentError
from pycoll.runtime.sessions.message_session import MpiSession
from pycoll.runtime.sessions.session import Session


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
        return DeviceSide(session, NcclLink(session, device))
    return DeviceSide(session, PeerLink(session, device, session.config.device_heap_bytes))

"""Handing file descriptors to peers on one host, over Unix sockets.

A descriptor of memory on a device leads nowhere by its number in `/proc`, as that of a memfd does:
it has to be sent. Nothing here waits for a peer that has not come as far: connections wait in the
queue of the one that listens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from pycoll.errors import TransportError

NAME_BYTES = 24  # of the name under which a `Counter` listens
LIMIT_S = 20.0  # for collecting the descriptors of all peers
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Counter:
    """Where peers of this user collect a descriptor."""

    def __init__(self) -> None:
        """Listen under a name that nobody knows yet.

        Raises:
            OSError: If there are no such sockets, or no descriptors left.
        """
        self.name: bytes = b"\0pycoll-" + secrets.token_hex(8).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.name)
            self._socket.listen(64)
        except BaseException:
            self._socket.close()
            raise

    def exchange(
        self, descriptor: int, names: Sequence[bytes], takers: int, limit: float
    ) -> list[int]:
        """Hand a descriptor to peers, and collect theirs; all of them do so at the same time.

        What fails closes the counter, so that peers who wait at it hear of that at once.

        Args:
            descriptor: One's own, which stays open here; -1 for none.
            names: Those of the counters at which to collect, in order.
            takers: How many peers come for this rank's.
            limit: Seconds for all of them together.

        Returns:
            A descriptor of each counter, which belong to the caller.

        Raises:
            OSError: If a peer does not come in time, or has gone.
            TransportError: If a peer is another user, or has sent none.
        """
        until = time.monotonic() + limit
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            calls = [stack.enter_context(_connected(name, until)) for name in names]
            for _ in range(takers):
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                call = stack.enter_context(self._socket.accept()[0])
                _check_user(call)
                socket.send_fds(call, [b"."], [descriptor])
            found: list[int] = []
            try:
                for call in calls:
                    found.append(_received(call, until))
            except BaseException:
                close_all(found)
                raise
            return found

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; -1 stands for none."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _connected(name: bytes, until: float) -> socket.socket:
    call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        call.settimeout(max(0.001, until - time.monotonic()))
        call.connect(name)
        _check_user(call)
    except BaseException:
        call.close()
        raise
    return call


def _check_user(call: socket.socket) -> None:
    raw = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(raw)[1]
    if user != os.geteuid():
        raise TransportError(f"a process of user {user} has come for memory of another user")


def _received(call: socket.socket, until: float) -> int:
    call.settimeout(max(0.001, until - time.monotonic()))
    # `socket.recv_fds` of Python 3.11 does not pass flags on.
    room = socket.CMSG_SPACE(_DESCRIPTOR.size)
    _, ancillary, *_ = call.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return int(_DESCRIPTOR.unpack(raw)[0])
    raise TransportError("a peer has sent no descriptor of its memory")

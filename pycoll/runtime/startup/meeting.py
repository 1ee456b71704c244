"""How the ranks of an elastic job meet: their launcher decides who makes up the next communicator.

Each process has a socket to the launcher, which knows for certain who lives. Processes *come*; when
all that have to are there, the launcher offers fresh memory to them, and when all have joined it,
lets them go. If one of them cannot any more, the offer is void and there is another one.

==========  =======================================================================================
to it       ``come`` serial, ``joined`` and ``failed`` offer, ``withdraw`` serial
from it     ``offer`` serial, offer, epoch, rank, world_size (with the descriptors of control and
            heap), ``go`` serial, epoch, count, ``late`` serial, text, ``end`` serial,
            text, ``waiting`` count
==========  =======================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeVar

from pycoll.config import MEETING_VARIABLE, Launch
from pycoll.errors import ArgumentError, CollTimeout, PeerLost, Revoked, TransportError

MOST_BYTES = 1 << 14
ANSWER_S = 1.0  # in which the launcher says who is missing
_CLOSED = "this process has left the job: it has closed its communicator"


class Joined(Protocol):
    """What `Link.meet` makes: a session."""

    link: Any
    epoch: int

    def close(self) -> None:
        """Drop it."""


_T = TypeVar("_T", bound=Joined)


def send(line: socket.socket, message: Mapping[str, Any], fds: tuple[int, ...] = ()) -> bool:
    """Send a message, maybe with descriptors; return whether the other side is there."""
    try:
        socket.send_fds(line, [json.dumps(message).encode()], fds)
    except OSError:  # gone, or it does not read
        return False
    return True


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors; None when the other side is gone.

    Raises:
        BlockingIOError: Nothing has come, and the socket does not block.
    """
    try:
        data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError:
        return None
    return (json.loads(data), fds) if data else None


class Link:
    """A process's side of the meetings of its job.

    Attributes:
        newcomers: Processes that wait to join, as far as has been heard.
    """

    def __init__(self, line: socket.socket) -> None:
        """Take the socket."""
        self._line: socket.socket | None = line
        self._serial = 0
        self.newcomers: int = 0
        self._holder: weakref.ref[Any] = weakref.ref(self)

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str]) -> Link | None:
        """Take the socket that ``pycoll run --elastic`` has left, or return None without one.

        The variable is removed, so that processes started from here do not take it for theirs.

        Raises:
            TransportError: The socket is not there.
        """
        text = environ.pop(MEETING_VARIABLE, None)
        if text is None:
            return None
        try:
            line = socket.socket(fileno=int(text))
            line.set_inheritable(False)
        except (ValueError, OverflowError, OSError) as error:
            raise TransportError(
                f"{MEETING_VARIABLE}={text}, but this process has no such socket: it is not the "
                f"process that `pycoll run --elastic` started ({error})"
            ) from error
        return cls(line)

    def held_by(self, session: Any) -> None:
        """Belong to a session from now on: this process has left the job when that is closed."""
        session.link, self._holder = self, weakref.ref(session)

    def let_go(self, session: Any) -> None:
        """Leave the job if the session is the one that this belongs to."""
        if self._holder() is session:
            self.close()

    def close(self) -> None:
        """Leave the job."""
        if self._line is not None:
            line, self._line = self._line, None
            with line, contextlib.suppress(OSError):  # the launcher may be gone
                line.shutdown(socket.SHUT_RDWR)  # a forked child may have the socket, too

    def listen(self) -> int:
        """Hear what has come, without waiting; return the number of newcomers."""
        while self._line is not None and select.select([self._line], [], [], 0)[0]:
            self._take()
        return self.newcomers

    def meet(self, join: Callable[[Launch], _T], limit_s: float) -> _T:
        """Join the next communicator of the job, with everybody who belongs to it.

        Args:
            join: Makes this process's part in the memory whose descriptors it is given, and which
                stay this method's; called once for each offer.
            limit_s: Seconds.

        Raises:
            CollTimeout: With who has not come. It can be called again.
            PeerLost: There will be no communicator, with the reason.
        """
        if self._line is None:
            raise ArgumentError(_CLOSED)
        end = time.monotonic() + limit_s
        self._serial += 1
        made: _T | None = None
        try:
            self._tell("come")
            while True:
                message, fds = self._next(end)
                name = message["name"]
                if name == "end":
                    raise PeerLost(message["text"])
                if name == "offer":
                    if made is not None:
                        made.close()
                    made = self._join(join, message, fds)
                elif name == "go" and made is not None:
                    made.epoch = message["epoch"]
                    self.held_by(made)
                    return made
        except BaseException:
            if made is not None:
                made.close()
            self._tell("withdraw")
            raise

    def _join(
        self, join: Callable[[Launch], _T], message: dict[str, Any], fds: list[int]
    ) -> _T | None:
        """Make this process's part; None if another process is the reason that it cannot be."""
        made, answer = None, "failed"
        try:
            made = join(Launch(message["rank"], message["world_size"], *fds))
            answer = "joined"
        except (PeerLost, Revoked):
            pass
        finally:
            for fd in fds:
                os.close(fd)
        self._tell(answer, offer=message["offer"])
        return made

    def _next(self, end: float) -> tuple[dict[str, Any], list[int]]:
        """Wait for a message of this meeting."""
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._line], [], [], min(left, 3600.0))[0]:
                if end - time.monotonic() <= 0:
                    raise CollTimeout(self._ask_who_is_late())
                continue
            message, fds = self._take()
            if message.get("serial") in (None, self._serial):
                return message, fds
            for fd in fds:  # of a meeting that this process has given up
                os.close(fd)

    def _take(self) -> tuple[dict[str, Any], list[int]]:
        """Receive one message."""
        assert self._line is not None
        got = receive(self._line)
        if got is None:
            raise TransportError("the launcher of this job is gone")
        if got[0]["name"] in ("waiting", "go"):
            self.newcomers = got[0]["count"]
        return got

    def _ask_who_is_late(self) -> str:
        """Give up, and return what the launcher says about it."""
        self._tell("withdraw")
        end = time.monotonic() + ANSWER_S
        while (left := end - time.monotonic()) > 0:
            if select.select([self._line], [], [], left)[0]:
                message, fds = self._take()
                for fd in fds:
                    os.close(fd)
                if message["name"] == "late" and message["serial"] == self._serial:
                    return message["text"]
        return "the launcher does not say which ranks have not come"

    def _tell(self, name: str, **more: Any) -> None:
        assert self._line is not None
        send(self._line, {"name": name, "serial": self._serial, **more})

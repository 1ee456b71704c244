"""Messages between two ranks: the part of a communicator that sends and receives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.runtime.arrays.host_arrays import on_device
from pycoll.runtime.calls import message_ends
from pycoll.runtime.calls.messages import MessageInfo
from pycoll.runtime.calls.methods import message
from pycoll.runtime.calls.work import Work
from pycoll.runtime.sessions.session import Session

ANY: int = message_ends.ANY
"""As ``src`` of a receiving call: from whichever rank sends first; as ``tag``: whatever its tag."""


class Messages:
    """The methods of `pycoll.Communicator` for messages, which no collective gets in the way of.

    Messages from one rank with one tag arrive in the order in which they were sent. Arguments that
    the calls share:

    * ``x``: to send, any array, a number or a list of numbers; to receive, a writable, contiguous
      array of the size and dtype of the message.
    * ``dst``, ``src``: rank to send to, or to receive from; ``src`` may be `pycoll.ANY`.
    * ``tag``: a number that the sender gives, 0 to 2**31 - 1.
    * ``timeout``: seconds until `CollTimeout`; by default the communicator's.
    * ``stream``: of arrays on a CUDA device, where both ends have to lie: the stream on which they
      are sent and received; by default the current one of CuPy.
    """

    _session: Session

    def _ends(self, x: Any, stream: Any) -> Session:
        """Return what sends and receives an array: the session, or its like for devices."""
        if stream is None and (type(x) is np.ndarray or not on_device(x)):
            return self._session
        ends: Session = self._session.device_side(x).messages(stream)
        return ends

    @message
    def send(
        self,
        x: Any,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | None = None,
        stream: Any = None,
    ) -> None:
        """Send an array to one rank; returns when ``x`` may be changed again."""
        self._ends(x, stream).send(x, dst, tag, timeout)

    @message
    def recv(
        self,
        x: Any,
        src: int = ANY,
        tag: int = 0,
        *,
        timeout: float | None = None,
        stream: Any = None,
    ) -> int:
        """Receive into ``x`` the next message with this tag, which may be `pycoll.ANY`.

        Returns:
            The rank that sent it.

        Raises:
            MismatchError: If dtype or size differ from the message's; the message stays.
        """
        return self._ends(x, stream).recv(x, src, tag, timeout)

    @message
    def isend(self, x: Any, dst: int, tag: int = 0, *, stream: Any = None) -> Work:
        """Send in the background; ``x`` must stay as it is until the `Work` is done.

        Without a reference to it the array is kept all the same. `Work.wait` returns None.
        """
        return self._ends(x, stream).isend(x, dst, tag)

    @message
    def irecv(self, x: Any, src: int = ANY, tag: int = 0, *, stream: Any = None) -> Work:
        """Receive in the background; `Work.wait` returns the rank that sent the message.

        Receives that fit the same message get theirs in the order in which they were called.
        """
        return self._ends(x, stream).irecv(x, src, tag)

    @message
    def sendrecv(
        self,
        x: Any,
        dst: int | None,
        out: Any,
        src: int | None = ANY,
        *,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> int | None:
        """Send ``x`` and receive into ``out`` at the same time, as in a shift along a ring.

        Args:
            x: Array to send.
            dst: Rank to send to, or None to send nothing, as at the end of a chain.
            out: Array to receive into; it may be ``x``, which is then replaced.
            src: Rank to receive from, or None to receive nothing.
            tag: Tag of what is sent.
            recv_tag: Tag of what is received; by default ``tag``.
            timeout: See the class.
            stream: See the class.

        Returns:
            The rank from which ``out`` came, or None.
        """
        tags = tag, tag if recv_tag is None else recv_tag
        return self._ends(out if dst is None else x, stream).sendrecv(
            x, dst, out, src, tags, timeout
        )

    def probe(self, src: int = ANY, tag: int = ANY, *, timeout: float | None = None) -> MessageInfo:
        """Wait for a message and leave it: who sent it, its tag and its size in bytes.

        A message that `irecv` waits for is not seen. Receive it with ``recv(x, m.src, m.tag)``.
        """
        return self._session.probe(src, tag, self._session.limit(timeout))

    def iprobe(self, src: int = ANY, tag: int = ANY) -> MessageInfo | None:
        """Return what `probe` returns if there is such a message now, else None."""
        return self._session.look(src, tag, 0.0)

"""Messages between two ranks whose arrays lie on a device.

The sender's host tells the receiver's what it sends: one message of 40 bytes through the mailboxes
of arrays in host memory, so tags, order, time limits and dead ranks are what they are there, and
nothing has to come back. The array goes from device to device in the order of streams: through
slots at the receiver or, if it is large and in the symmetric heap, from where it lies.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycoll.cuda.calls.ragged import apart
from pycoll.cuda.device import arrays
from pycoll.cuda.device.library import Message
from pycoll.errors import ArgumentError, CollError, MismatchError
from pycoll.runtime.arrays.host_arrays import ArrayView, check_output
from pycoll.runtime.calls.message_ends import ANY
from pycoll.runtime.calls.messages import MessageWork
from pycoll.runtime.calls.work import Work
from pycoll.runtime.sessions.p2p import one_way
from pycoll.runtime.sessions.session import Session

_HEADER = np.dtype(
    [(name, np.uint64) for name in ("device_type", "nbytes", "number", "slotted", "offset")]
)
"""What hosts send each other; no array of a user has these fields."""


class Arrived(NamedTuple):
    """A message of which the receiver's host knows."""

    source: int
    tag: int
    code: int  # of the element type
    nbytes: int
    number: int  # of its first part, among those from the sender to the receiver
    slotted: int  # 0: it lies in the sender's heap
    offset: int  # where in the heap


class MessageState:
    """What the messages of one rank have in common."""

    def __init__(self, world_size: int) -> None:
        """Begin with none."""
        self.numbers: list[int] = [0] * world_size  # of the next part to each rank
        self.unfit: list[Arrived] = []  # they stay, as who received them had another array
        self.held: deque[tuple[Any, Any]] = deque()  # event, arrays: under way
        self.unsettled: set[DeviceSend] = set()  # sent from the heap, and not waited for
        self.background: Any = None  # stream of what has to wait for room behind a caller's back

    def hold(self, event: Any, memory: Any) -> None:
        """Keep arrays until an event has happened."""
        while self.held and self.held[0][0].done:
            self.held.popleft()
        self.held.append((event, memory))


class DeviceMessages:
    """Sends and receives on one stream; the methods are those of a session.

    A blocking call waits on the host for what the other host has to say, and the stream for the
    bytes: it goes on when an array that was sent may be changed.
    """

    def __init__(self, side: Any, session: Session, state: MessageState, stream: Any) -> None:
        """Take part on a `pycoll.cuda.calls.side.DeviceSide`.

        Raises:
            ArgumentError: If a graph is being captured, or devices cannot reach each other yet.
        """
        side.check()
        side.transport.check_messages()
        self._side, self._session, self._state = side, session, state
        self._transport, self._on_host = side.transport, stream is None
        self._cuda, self._stream = arrays.cupy().cuda, arrays.stream_of(stream)
        if self._cuda.runtime.streamIsCapturing(self._stream):
            raise ArgumentError(
                "send and recv of arrays on a device cannot be captured: a message has a number, "
                "which a graph would repeat; capture a collective, or VirtualRanks.sendrecv"
            )

    def send(self, x: Any, dst: int, tag: int, timeout: float | None) -> None:
        """See `pycoll.Communicator.send`."""
        self._finish(self._send(x, dst, tag, timeout, True).event, x, timeout)

    def isend(self, x: Any, dst: int, tag: int) -> DeviceSend:
        """See `pycoll.Communicator.isend`."""
        return self._send(x, dst, tag, None, False)

    def recv(self, x: Any, src: int, tag: int, timeout: float | None) -> int:
        """See `pycoll.Communicator.recv`."""
        target, arrived = self._target(x), self.unfit(src, tag)
        if arrived is None:
            if tag == ANY:
                src, tag, _ = self._session.probe(src, tag, self._session.limit(timeout))
            words = np.zeros(1, _HEADER)
            try:
                source = self._session.recv(words, src, tag, timeout)
            except MismatchError as error:
                raise MismatchError(
                    f"{error}\nThe array to receive into lies on a device, so what is sent has to"
                ) from None
            arrived = Arrived(source, tag, *words[0].tolist())
        self._finish(self.take(target, arrived, timeout), x, timeout)
        return arrived.source

    def irecv(self, x: Any, src: int, tag: int) -> DeviceReceive:
        """See `pycoll.Communicator.irecv`."""
        target, arrived = self._target(x), self.unfit(src, tag)
        words = np.zeros(1, _HEADER)
        host = None if arrived is not None else self._session.irecv(words, src, tag)
        return DeviceReceive(self, target, tag, words, host, arrived)

    def sendrecv(
        self,
        x: Any,
        dst: int | None,
        out: Any,
        src: int | None,
        tags: tuple[int, int],
        timeout: float | None,
    ) -> int | None:
        """See `pycoll.Communicator.sendrecv`."""
        if dst is None or src is None:
            return one_way(self, x, dst, out, src, tags, timeout)
        sent = self._send(x, dst, tags[0], timeout, False, self._target(out))
        source = self.recv(out, src, tags[1], timeout)
        sent.wait(timeout, stream=self._stream)
        self._finish(sent.event, x, timeout)
        return source

    def _target(self, x: Any) -> ArrayView:
        target = self._side.look(x, "x", self._stream)
        check_output(target, target.array.shape, None, "x")
        return target

    def unfit(self, src: int, tag: int) -> Arrived | None:
        """Return, once, what has arrived before and did not fit."""
        for index, found in enumerate(self._state.unfit):
            if src in (ANY, found.source) and tag in (ANY, found.tag):
                return self._state.unfit.pop(index)
        return None

    def take(self, target: ArrayView, arrived: Arrived, timeout: float | None) -> Any:
        """Put the copy of a message on the stream; return the event behind it.

        Raises:
            MismatchError: If the array is another one; the message stays.
        """
        nbytes = target.array.nbytes
        if (arrived.code, arrived.nbytes) != (target.code, nbytes):
            self._state.unfit.insert(0, arrived)
            same = "the same" if arrived.code == target.code else "another"
            raise MismatchError(
                f"recv on rank {self._session.rank}: rank {arrived.source} has sent "
                f"{arrived.nbytes} bytes of {same} type with tag {arrived.tag}, and the array has "
                f"{nbytes} bytes of {target.name}; the message stays"
            )
        message = Message(
            arrived.number,
            nbytes,
            target.pointer or None,
            arrived.offset,
            arrived.source,
            arrived.slotted,
        )
        return self._launch("receive", message, self._stream, timeout, target)

    def _send(
        self,
        x: Any,
        dst: int,
        tag: int,
        timeout: float | None,
        awaits: bool,
        target: ArrayView | None = None,
    ) -> DeviceSend:
        """Put a message on the stream, and tell the receiver of it.

        Args:
            x: The array.
            dst: The receiver.
            tag: The tag.
            timeout: Seconds, also until the receiver takes it.
            awaits: The stream is to wait until ``x`` may be changed.
            target: An array that is written meanwhile.
        """
        session, state, transport = self._session, self._state, self._transport
        session.check_end(dst, tag)
        v = apart(self._side.look(x, "x", self._stream), target, self._stream)
        own = dst == session.rank  # nobody but this stream would receive it
        if own:
            v = arrays.duplicate(v, arrays.cupy().empty, self._stream)
        nbytes, stream = v.array.nbytes, self._stream
        slotted = not transport.reaches(v) or transport.parts(nbytes, True) == 1
        parts = transport.parts(nbytes, slotted)
        if slotted and parts > transport.PLACES and (own or not awaits):
            stream = self._aside()
        number = state.numbers[dst]
        message = Message(number, nbytes, v.pointer or None, 0, dst, slotted, 1)
        message.awaits = awaits and not slotted
        offset = 0 if slotted else transport.offset(v.pointer)
        words = np.array([(v.code, nbytes, number, slotted, offset)], _HEADER)
        session.send(words, dst, tag, timeout)
        state.numbers[dst] += parts
        try:
            event = self._launch("send", message, stream, timeout, v)
        except BaseException:
            session.abort(f"rank {session.rank} could not launch what it had promised rank {dst}")
            raise
        return DeviceSend(self, message, event, v, not slotted and not awaits)

    def _aside(self) -> int:
        """Return the stream of the background, behind what the caller's has to do."""
        if self._state.background is None:
            self._state.background = self._cuda.Stream(non_blocking=True)
        arrays.order(self._state.background.ptr, self._stream)
        return self._state.background.ptr

    def _launch(
        self, name: str, message: Message, stream: int, timeout: float | None, memory: Any
    ) -> Any:
        """Launch one side of a message; return the event behind it."""
        limit, what = self._session.limit(timeout), (f"{name} {message.nbytes} B", message.nbytes)
        launch = partial(self._transport.message, name, message, stream, limit)
        with self._cuda.Device(self._transport.device):
            self._side.times.run(launch, lambda: what, stream, False)
            event = self._cuda.Event(disable_timing=True)
            self._cuda.runtime.eventRecord(event.ptr, stream)
        self._state.hold(event, memory)
        return event

    def _finish(self, event: Any, x: Any, timeout: float | None) -> None:
        """Wait on the host where the stream is unknown on which an array will be used."""
        if self._on_host and not arrays.is_cupy(x):
            self._side.synchronize(event, self._session.limit(timeout))

    def settle(self, message: Message, stream: int, timeout: float | None, memory: Any) -> Any:
        """Make a stream wait until the receiver has a message; return the event behind that."""
        message.posts, message.awaits = 0, 1
        return self._launch("send", message, stream, timeout, memory)

    def is_taken(self, message: Message) -> bool:
        """Tell whether the receiver has a message."""
        return self._transport.taken(message)

    def order(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""
        self._side.check()
        self._cuda.runtime.streamWaitEvent(arrays.stream_of(stream), event.ptr)

    def synchronize(self, event: Any, timeout: float) -> None:
        """Wait on the host for an event; see `DeviceSide.synchronize`."""
        self._side.synchronize(event, timeout)

    def keep(self, sent: DeviceSend, unsettled: bool) -> None:
        """Keep what was sent from the heap until somebody has waited for it."""
        (self._state.unsettled.add if unsettled else self._state.unsettled.discard)(sent)


class DeviceSend(Work):
    """A message that was sent on a stream."""

    def __init__(
        self, messages: DeviceMessages, message: Message, event: Any, memory: Any, unsettled: bool
    ) -> None:
        self._messages, self._message, self._memory = messages, message, memory
        self.event: Any = event
        self._unsettled = unsettled
        messages.keep(self, unsettled)

    def done(self) -> bool:
        """Tell whether the array may be changed, without waiting."""
        if self._unsettled and self.event.done and self._messages.is_taken(self._message):
            self._settled()
        return bool(self.event.done) and not self._unsettled

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> None:
        """Make a stream wait until the array may be changed; the host does not wait.

        Args:
            timeout: Seconds until the stream gives up.
            stream: The stream; by default the current one of CuPy.

        Raises:
            CollError: If something is known to have failed.
        """
        if self._unsettled:
            handle, rest = arrays.stream_of(stream), (timeout, self._memory)
            self.event = self._messages.settle(self._message, handle, *rest)
            self._settled()
        self._messages.order(stream, self.event)

    def synchronize(self, timeout: float = 300.0) -> None:
        """Wait on the host until the array may be changed; see `DeviceWork.synchronize`."""
        self.wait(timeout)
        self._messages.synchronize(self.event, timeout)

    def _settled(self) -> None:
        self._unsettled = False
        self._messages.keep(self, False)


class DeviceReceive(Work):
    """A message to be received; its copy begins in `wait`, or in `done` once it has been sent."""

    def __init__(
        self,
        messages: DeviceMessages,
        target: ArrayView,
        tag: int,
        words: np.ndarray,
        host: MessageWork | None,
        arrived: Arrived | None,
    ) -> None:
        self._messages, self._target, self._tag = messages, target, tag
        self._words, self._host, self._arrived = words, host, arrived
        self._event: Any = None
        self._error: CollError | None = None

    def done(self) -> bool:
        """Tell whether it has been received, or has failed, without waiting for it."""
        if self._event is None and self._error is None:
            if self._host is not None and not self._host.done():
                return False
            try:
                self._begin(None)
            except CollError:
                return True
        return self._error is not None or bool(self._event.done)

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> int:
        """Wait on the host until the message is on its way, and make a stream wait for the bytes.

        Args:
            timeout: Seconds, for the host, and for the stream that copies the bytes.
            stream: The stream; by default the current one of CuPy.

        Returns:
            The rank that sent it.

        Raises:
            CollTimeout: If it has not been sent in time; it may be waited for again.
            CollError: What `recv` would have raised.
        """
        source = self._begin(timeout)
        self._messages.order(stream, self._event)
        return source

    def synchronize(self, timeout: float = 300.0) -> int:
        """Wait on the host until it has been received, and return the rank that sent it."""
        source = self._begin(timeout)
        self._messages.synchronize(self._event, timeout)
        return source

    def _begin(self, timeout: float | None) -> int:
        if self._error is not None:
            raise self._error
        if self._arrived is None:
            source = self._host.wait(timeout)
            self._arrived = Arrived(source, self._tag, *self._words[0].tolist())
        if self._event is None:
            try:
                self._event = self._messages.take(self._target, self._arrived, timeout)
            except MismatchError as error:
                self._error = error
                raise
        return self._arrived.source

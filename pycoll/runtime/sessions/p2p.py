"""Messages from one rank to another: the part of a session that sends and receives them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from pycoll import _C
from pycoll.errors import (
    ArgumentError,
    CollError,
    CollTimeout,
    CommClosed,
    ConcurrentUseError,
    PeerLeft,
    kind_of,
)
from pycoll.runtime.arrays.host_arrays import ArrayView, check_output, view
from pycoll.runtime.arrays.numbers import as_array
from pycoll.runtime.calls.message_ends import ANY, MessageEnds, is_integer
from pycoll.runtime.calls.messages import MessageInfo, MessageWork, ObjectReceives
from pycoll.runtime.calls.parts.encoding import pack, unpack
from pycoll.runtime.sessions.reports import what_others_do
from pycoll.types import type_code

_MOST_CODES = 256
_MOST_AHEAD, _SMALL = 4096, 16 << 10  # messages that wait for room, and bytes of one
_PATIENCE_S = 1e-4  # until the first is among them
_CODES: dict[np.dtype | int, int] = {}
"""The element types of what was sent or received, and their numbers: of NumPy arrays by dtype, of
tensors by `_C.element`."""
_OBJECT = type_code("object")


class TaggedMessages(MessageEnds):
    """The methods of `pycoll.runtime.sessions.session.Session` behind ``send`` and ``recv``."""

    world_size: int
    rank: int
    closed_because: str
    under_way: set[Any]  # messages that have not ended, which keep their arrays
    _ahead: deque[MessageWork]  # messages that wait for room, and whose senders do not
    memory: Any  # where registered arrays are, see `Memory`
    object_receives: ObjectReceives
    fast: Any  # serves messages, see `Messages`
    _engine: Any
    _postbox: Any = None

    def _open_postbox(self, postbox: Any) -> None:
        self._postbox, self.object_receives = postbox, ObjectReceives()
        self.serve_messages(True)

    def serve_messages(self, quickly: bool) -> None:
        """Let messages go without Python code where they can, or not, as a trace needs it."""
        box = self._postbox if quickly else None
        objects = pack, unpack, _OBJECT, self.object_receives
        self.fast.use_messages(box, _CODES, MessageWork, self.config.timeout_s, objects)

    def send(self, x: Any, dst: int, tag: int, timeout: float | None) -> None:
        """See `pycoll.Communicator.send`."""
        limit = self.limit(timeout)
        x, *message = self._to_send(x, dst, tag)
        self.deliver(x, message, limit)

    def recv(self, x: Any, src: int, tag: int, timeout: float | None) -> int:
        """See `pycoll.Communicator.recv`."""
        limit = self.limit(timeout)
        try:
            _held, *target = self._to_receive(x, src, 0 if tag == ANY else tag)
            return self._take_any(target, src, limit) if tag == ANY else self.take(target, limit)
        except (CollTimeout, PeerLeft) as error:
            self._name_what_waits(error)
            raise

    def _take_any(self, target: Sequence[int], src: int, limit: float) -> int:
        until, source, left = time.monotonic() + limit, None, limit
        while source is None:  # another thread may receive what is found
            info = self.look(src, ANY, left) or self.nothing_came("recv", src, limit)
            with self.memory.holding(*target[:2]):
                receive = self.postbox().recv_found
                source = self.messaging(receive, *target[:3], *info, limit)
            left = max(0.0, until - time.monotonic())
        return int(source)

    def leave_behind(self, ticket: int, x: Any, limit: float) -> None:
        """Wait for a message that is sent, or let a small one wait for room in memory of its own.

        So the peer may be in any call, and receive it later.
        """
        ahead = self._ahead
        with contextlib.suppress(IndexError):  # none is left, or another thread was faster
            while ahead[0].done():
                ahead.popleft()
        postbox = self._postbox  # another thread may close it meanwhile
        runs_ahead = isinstance(postbox, _C.Postbox) and postbox.small(x.nbytes)
        if runs_ahead and x.nbytes <= _SMALL and len(ahead) < _MOST_AHEAD:
            patience = 0.0 if ahead else _PATIENCE_S
            if not self.messaging(postbox.leave_behind, ticket, patience):
                ahead.append(MessageWork(self, ticket, None, True))
            return
        self._finish_send(ticket, x, limit)

    def isend(self, x: Any, dst: int, tag: int) -> MessageWork:
        """See `pycoll.Communicator.isend`."""
        x, *message = self._to_send(x, dst, tag)
        return self.begin(x, message)

    def begin(self, x: Any, message: Sequence[int]) -> MessageWork:
        """Send an array in the background: address, bytes, type, rank and tag."""
        return MessageWork(self, self._post(message), x, True)

    def irecv(self, x: Any, src: int, tag: int) -> MessageWork:
        """See `pycoll.Communicator.irecv`."""
        return self._received(*self._to_receive(x, src, tag))

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
        limit = self.limit(timeout)
        x, *message = self._to_send(x, dst, tags[0])
        out, *coming = self._to_receive(out, src, tags[1])
        if _C.address(x) == coming[0]:
            x, message = _copied(x, message)
        received = self._received(out, *coming)
        try:
            if ticket := self._post(message):
                self._finish_send(ticket, x, limit)
            return received.wait(limit)
        except BaseException:  # the caller may change `out` then
            if self._engine is not None:
                received.forget()
            raise

    def start_shift(
        self, x: Any, dst: int | None, src: int | None, tag: int
    ) -> tuple[MessageWork | None, MessageWork | None]:
        """Begin to receive into an array, and to send what it has now; None for no such end."""
        target = None if src is None else self._to_receive(x, src, tag)
        going = None
        if dst is not None:
            given, *message = self._to_send(x, dst, tag)
            given, message = _copied(given, message)
            going = MessageWork(self, self._post(message), given, True)
        return None if target is None else self._received(*target), going

    def finish_exchange(self, coming: int, going: int, x: Any, limit: float) -> int:
        """Wait for two messages in the postbox; return who sent the one that comes."""
        try:
            self._finish_send(going, x, limit)
            return MessageWork(self, coming, None, False).wait(limit)
        except BaseException:  # the caller may change the array then
            if (postbox := self._postbox) is not None:
                postbox.forget(coming)
            raise

    def probe(self, src: int, tag: int, limit: float) -> MessageInfo:
        """Wait so many seconds for a message; see `pycoll.Communicator.probe`."""
        return self.look(src, tag, limit) or self.nothing_came("probe", src, limit)

    def look(self, src: int, tag: int, limit: float) -> MessageInfo | None:
        """Return what is known of a message, or None if there is none in time."""
        found = self.messaging(self.postbox().probe, *self._from(src, tag), limit)
        return None if found is None else MessageInfo(found[0], found[1], found[3])

    def take_bytes(self, src: int, tag: int, limit: float) -> tuple[bytes, int]:
        """Receive the next bytes, however many; return them and the sender."""
        box, ends = self.postbox(), self._from(src, tag)
        found: tuple[bytes, int] | None = self.messaging(box.take_bytes, _OBJECT, *ends, limit)
        return self.nothing_came("recv_object", src, limit) if found is None else found

    def take_found(self, info: MessageInfo, limit: float) -> bytes | None:
        """Receive the bytes that were found; None if another thread has received them."""
        take = self.postbox().take_found
        found: bytes | None = self.messaging(take, *info, _OBJECT, limit)
        return found

    def _from(self, src: int, tag: int) -> tuple[int, int]:
        return self._source(src), -1 if tag == ANY else self._tag(tag)

    def nothing_came(self, call: str, src: int, limit: float) -> NoReturn:
        """Raise what a call raises for which no message has come in time."""
        source = "any rank" if src < 0 else f"rank {src}"
        text = f"{call} on rank {self.rank}: nothing from {source} in {limit:g} s"
        raise CollTimeout(text + what_others_do(self))

    def discard(self, src: int, tag: int) -> None:
        """Receive a message that is there, whatever it is, and forget it."""
        source, nbytes, code, tag, limit = src, 0, 0, self._tag(tag), self.limit(None)
        found = self.messaging(self.postbox().probe, source, tag, limit)
        if found is not None:
            source, tag, code, nbytes = found
            data = np.empty(nbytes, np.uint8)
            self.take((_C.address(data), nbytes, code, source, tag), limit)

    def deliver(self, x: Any, message: Sequence[int], limit: float) -> None:
        """Send an array: address, bytes, type, rank and tag."""
        if ticket := self._post(message):
            self.leave_behind(ticket, x, limit)

    def take(self, message: Sequence[int], limit: float) -> int:
        """Receive a message, likewise; return the sender."""
        with self.memory.holding(*message[:2]):
            source: int = self.messaging(self.postbox().recv, *message, limit)
        return source

    def messaging(self, function: Any, *args: Any) -> Any:
        """Call what moves messages, and turn its failures into pycoll's exceptions."""
        return self.guard(function, *args)

    def message_failed(self, error: BaseException, sent: Any, receives: bool) -> NoReturn:
        """Raise what a message that has failed raises."""
        if sent is not None:
            self.abandon(sent)
        _ = self.postbox()  # raises CommClosed
        try:
            if isinstance(error, _C.EngineError):
                self.messaging(_fail, *error.args)
            self.messaging(_raise, error)
        except (CollTimeout, PeerLeft) as failure:
            if receives:
                self._name_what_waits(failure)
            raise
        raise error

    def _name_what_waits(self, error: BaseException) -> None:
        """Say in the error of a receive which message is there instead."""
        with contextlib.suppress(CollError):
            if other := self.look(ANY, ANY, 0.0):
                error.args = (
                    f"{error}; a message of rank {other.src} waits, with tag {other.tag} and "
                    f"{other.nbytes} bytes (tag=pycoll.ANY takes any)",
                )
        if isinstance(error, CollTimeout):
            error.args = (f"{error}{what_others_do(self)}",)

    def limit(self, timeout: float | None) -> float:
        """Return the seconds that a call may take."""
        return self._limit(timeout)

    def postbox(self) -> Any:
        """Return what moves messages.

        Raises:
            CommClosed: If there is none any more.
        """
        if self._engine is None:
            raise CommClosed(self.closed_because)
        return self._postbox

    def finish_sends(self, limit_s: float) -> CollError | None:
        """Wait for messages of `isend` that nobody has waited for, at the end of a communicator.

        Returns:
            What became of the first that was not received in time; None if all were, and of a
            communicator that has failed.

        Raises:
            ConcurrentUseError: If another thread waits for one.
        """
        until, lost = time.monotonic() + limit_s, None
        for work in [work for work in list(self.under_way) if work.sends]:
            try:
                work.wait(max(0.0, until - time.monotonic()))
            except (CollTimeout, PeerLeft) as error:
                lost = lost or type(error)(f"a message was not received: {error}")
            except ConcurrentUseError:  # whoever waits would not hear of it
                raise
            except CollError:
                break
        return lost

    def close_postbox(self) -> None:
        """End all messages that are under way."""
        if self._postbox is not None:
            self._postbox.close()
            for work in list(self.under_way):  # another thread may add one meanwhile
                self.abandon(work._memory)
                work._close()
            self.under_way.clear()

    def _to_send(self, x: Any, dst: int, tag: int) -> tuple[Any, ...]:
        """Return a contiguous array, and what the engine needs to know of it."""
        _ = self.postbox()  # raises CommClosed
        plain = _C.stretch(x, False)
        code = None if plain is None else _CODES.get(x.dtype)
        if code is None:
            given = as_array(x)
            source = view(given, "x")
            _remember(given, source.code)
            x, code = np.ascontiguousarray(source.array), source.code
            plain = ArrayView(x, source.dtype, source.name, x).pointer, x.nbytes
        self._check_dst(dst)
        return x, *plain, code, dst, self._tag(tag)

    def packed_to_send(self, data: bytes, dst: int, tag: int) -> tuple[Any, ...]:
        """Return likewise what sends an object, from its bytes."""
        x, *where, _, dst, tag = self._to_send(np.frombuffer(data, np.uint8), dst, tag)
        return x, *where, _OBJECT, dst, tag

    def _to_receive(self, x: Any, src: int, tag: int) -> tuple[Any, ...]:
        """Return what keeps memory that is to be filled in its place, and what the engine needs."""
        _ = self.postbox()  # raises CommClosed
        plain = _C.stretch(x, True)
        code = None if plain is None else _CODES.get(x.dtype)
        if code is None:
            if is_integer(x):
                text = f"a message is received into an array, and this is {kind_of(x)}"
                raise ArgumentError(f"{text}: recv(x, src)")
            target = view(x, "x")
            check_output(target, target.array.shape, None, "x")
            _remember(x, code := target.code)
            x, plain = target.array, (target.pointer, target.array.nbytes)
        return x, *plain, code, self._source(src), self._tag(tag)

    def _post(self, message: Sequence[int]) -> int:
        ticket: int = self.messaging(self.postbox().send, *message)
        return ticket

    def _received(self, x: Any, *message: int) -> MessageWork:
        postbox = self.postbox()
        with self.memory.holding(*message[:2]) as part:
            work = MessageWork(self, self.messaging(postbox.recv, *message), x, False)
            if part is not None:
                self.memory.lend(part, postbox, work._ticket)
        return work

    def _finish_send(self, ticket: int, x: Any, limit: float) -> None:
        """Wait for a message that is sent; half of it may have arrived if the time is over."""
        try:
            self.messaging(self.postbox().finish_send, ticket, limit)
        except BaseException as error:
            self.abandon(x)
            if isinstance(error, CollTimeout):
                error.args = (f"{error}{what_others_do(self)}",)
            raise

    def end_send(self, ticket: int, x: Any) -> None:
        """End a message that is sent, now; abort if not all of it has been taken."""
        self._finish_send(ticket, x, 0.0)

    def abandon(self, memory: Any) -> None:
        """Do nothing: in shared memory, who gives up sending takes back what he has offered."""


def _copied(x: np.ndarray, message: list[Any]) -> tuple[np.ndarray, list[Any]]:
    """Return a copy of an array that is sent, and what the engine needs to know of it."""
    x = x.copy()
    return x, [_C.address(x), *message[1:]]


def _fail(kind: str, text: str) -> NoReturn:
    """Raise an error of the engine that no frame refers to: a cycle would keep the array."""
    raise _C.EngineError(kind, text)


def _raise(error: BaseException) -> NoReturn:
    raise error


def one_way(
    ends: Any,
    x: Any,
    dst: int | None,
    out: Any,
    src: int | None,
    tags: tuple[int, int],
    timeout: float | None,
) -> int | None:
    """Do what is left of a `sendrecv` to nobody, or from nobody."""
    if dst is not None:
        ends.send(x, dst, tags[0], timeout)
    return None if src is None else ends.recv(out, src, tags[1], timeout)


def _remember(x: Any, code: int) -> None:
    """Note the number of the element type of an array or tensor that `view` has accepted.

    Not that of dates and records, which may be equal and yet have other names: 1000 ms and 1 s.
    """
    if len(_CODES) >= _MOST_CODES:
        return
    if type(x) is np.ndarray:
        if x.dtype.kind not in "mMV":
            _CODES[x.dtype] = code
    elif element := _C.element(x):
        _CODES[element] = code

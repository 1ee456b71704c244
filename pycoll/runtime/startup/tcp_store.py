"""A store of texts that the ranks of several hosts can reach: rank 0 serves it while they join.

A connection first proves that it knows the secret of the job, by HMAC-SHA256 of a challenge, and
the server does so, too. Then each line is a request, ``["set", key, text]`` or ``["get", key]``,
and each answer a line: the text, or null. Who does not know the secret gets nothing, and holds
nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import threading
import time
from typing import Any, NoReturn

from pycoll.errors import CollTimeout, PeerLost, TransportError
from pycoll.runtime.sessions.message_session import OWN_THREAD
from pycoll.runtime.startup.tcp_proofs import OTHER_SECRET, keyed, same

_MOST_BYTES = 1 << 20  # of a line
_HELLO_S = 3.0  # in which a connection proves that it belongs here
_CALL_S = 3.0  # for one address of rank 0's host
_PAUSE_S = 0.05
_MOST_STRANGERS = 64  # connections that may be about to prove it, besides those that can
_CHALLENGE_BYTES = 32
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class StoreServer:
    """Serves a store in a thread, until all clients that are expected have come and gone."""

    def __init__(self, port: int, secret: str, clients: int) -> None:
        """Listen.

        Raises:
            TransportError: If the port is taken.
        """
        self._texts: dict[str, str] = {}
        self._secret, self._left, self._here = secret, clients, 0
        self._most_unproven = clients + _MOST_STRANGERS
        self._talks: dict[Any, asyncio.StreamWriter] = {}  # by task, one for each connection
        try:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            dual = family == socket.AF_INET6
            self._socket = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise TransportError(
                f"rank 0 cannot listen on port {port}, where the ranks were to meet: "
                f"{error.strerror}; choose another MASTER_PORT"
            ) from error
        self._done, self._loop = asyncio.Event(), asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        threading.Thread(target=self._run, name=OWN_THREAD, daemon=True).start()

    def close(self, patience_s: float = 0.0) -> None:
        """Serve nobody any more, once all have gone; for a rank that has failed."""
        until = time.monotonic() + patience_s
        while self._here and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._done.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._talk, sock=self._socket, limit=_MOST_BYTES)
        async with server:
            await self._done.wait()
            server.close()
            for writer in self._talks.values():
                writer.transport.abort()
            await asyncio.gather(*self._talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known, talk = False, asyncio.current_task()
        self._talks[talk] = writer
        try:
            if len(self._talks) - self._here > self._most_unproven:
                return  # a rank that belongs here tries again
            known = await asyncio.wait_for(self._greet(reader, writer), _HELLO_S)
            self._here += known
            while known and (line := await reader.readline()):
                writer.write(json.dumps(self._answer(json.loads(line))).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, EOFError, asyncio.TimeoutError):
            pass  # a stranger, or one that has died, of which its host and peers hear otherwise
        finally:
            writer.close()
            self._talks.pop(talk)
            self._left, self._here = self._left - known, self._here - known
            if self._left <= 0:
                self._done.set()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Tell whether the other end knows the secret, and show that this one does."""
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        writer.write(own)
        proof, other = await reader.readexactly(32), await reader.readexactly(_CHALLENGE_BYTES)
        if not same(proof, keyed(self._secret, b"client\0" + own)):
            writer.write(secrets.token_bytes(32))  # which shows the other end that secrets differ
            who = writer.get_extra_info("peername")[0]
            self._texts[OTHER_SECRET] = who.removeprefix("::ffff:")
            return False
        writer.write(keyed(self._secret, b"server\0" + other))
        return True

    def _answer(self, request: Any) -> str | None:
        if request[0] == "set":
            self._texts[str(request[1])] = str(request[2])
        return self._texts.get(str(request[1]))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Show what has gone wrong, but for a lack of descriptors: it is tried again, at every turn."""
    if getattr(context.get("exception"), "errno", None) not in _NO_DESCRIPTOR:
        loop.default_exception_handler(context)


class StoreClient:
    """A rank's way to the store; what `pycoll.runtime.startup.tcp_connections.Board` asks for."""

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        """Connect, as soon as the server is there.

        Raises:
            CollTimeout: If it is not there in time.
            PeerLost: If it was there and is gone.
            TransportError: If there is no such host, or it has another secret, or this process has
                no descriptor left.
        """
        self.host: str = host
        self._met = False
        end = time.monotonic() + timeout_s
        why = "no answer"
        self._place = f"{host} port {port}"
        while True:
            try:
                self._connect(host, port, max(_PAUSE_S, timeout_s))
                self._greet(secret)
                return
            except socket.gaierror as error:
                raise TransportError(
                    f"MASTER_ADDR={host} is no host that this one knows: {error.strerror}"
                ) from error
            except OSError as error:
                why = error.strerror or str(error)
                if error.errno in _NO_DESCRIPTOR:
                    raise TransportError(
                        f"a connection to rank 0, at {self._place}, needs an open file: {why}; "
                        "raise the limit of open files (ulimit -n)"
                    ) from error
                if self._met and isinstance(error, ConnectionRefusedError):
                    self._has_left(error)
            if time.monotonic() > end:
                raise CollTimeout(
                    f"rank 0 was not at {self._place} within {timeout_s:.3g} s ({why}): it has not "
                    "called pycoll.init, or that place cannot be reached from here"
                )
            time.sleep(_PAUSE_S)

    def _connect(self, host: str, port: int, timeout_s: float) -> None:
        # An address that does not answer leaves time for the next one of this host, and again.
        patience_s = max(_PAUSE_S, min(_CALL_S, timeout_s / 4))
        self._line = socket.create_connection((host, port), patience_s)
        self._line.settimeout(timeout_s)
        self._file = self._line.makefile("rwb")
        if self._line.getsockname() == self._line.getpeername():  # nobody listens there
            self.close()
            raise ConnectionRefusedError("a connection of this process to itself")

    def _greet(self, secret: str) -> None:
        """Show that this end knows the secret, and that the other one does.

        Raises:
            OSError: If the server is too busy with others, or gave up, as when the network stalls.
            PeerLost: If it does not answer.
            TransportError: If it has another secret.
        """
        try:
            self._prove(secret)
        except BaseException:
            self.close()
            raise

    def _prove(self, secret: str) -> None:
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        other = self._read(_CHALLENGE_BYTES)
        if len(other) < _CHALLENGE_BYTES:
            raise ConnectionResetError("it hung up at once")
        self._met = True
        self._file.write(keyed(secret, b"client\0" + other) + own)
        self._file.flush()
        shown = self._read(32)
        if len(shown) < 32:  # it gave up before it had our proof, and has not judged it
            raise ConnectionResetError("it hung up before it had shown anything")
        if not same(shown, keyed(secret, b"server\0" + own)):
            raise TransportError(
                f"what listens at {self._place} does not know the secret of this job: set "
                "PYCOLL_SECRET to the same text for every rank"
            )

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._file.read(nbytes)
        except ConnectionResetError:
            raise
        except OSError as error:
            raise PeerLost(f"rank 0, at {self._place}, does not answer: {error}") from error

    def _has_left(self, why: OSError | None = None) -> NoReturn:
        raise PeerLost(f"rank 0, at {self._place}, has left while ranks were joining") from why

    def set(self, key: str, value: str) -> None:
        """Write a text."""
        self._ask("set", key, value)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these have been written."""
        return all(self._ask("get", key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Read what has been written."""
        text = self._ask("get", key)
        if text is None:
            raise KeyError(key)
        return text.encode()

    def _ask(self, *request: str) -> str | None:
        try:
            self._file.write(json.dumps(request).encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
        except OSError as error:
            raise PeerLost(f"rank 0, at {self._place}, does not answer: {error}") from error
        if not line:
            self._has_left()
        return json.loads(line)

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._line.close()

"""Calls in the background: their arrays stay until they have ended, whoever forgets about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pycoll import _C
from pycoll.errors import CollError
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.calls.work import Work


class Flight:
    """A call in the queue of an engine.

    The hot path makes it without running Python code, so it has no ``__init__``.

    Attributes:
        ticket: Its place in the queue; None before it has one.
        keep: What has to stay until it has ended, besides the result.
        result: What the call gives.
        ended: It has ended, and `error` is what it has failed with, or None.
    """

    ticket: int | None = None
    keep: Any = None
    result: Any = None
    error: Exception | None = None
    ended = False

    def land(self, engine: Any, describe: Callable[[str, str], CollError]) -> bool:
        """Take over from the engine how the call has ended; tell whether it has.

        Several threads may do so at a time: the error is here before the engine forgets it.
        """
        if self.ended:
            return True
        if self.ticket is None or not engine.done(self.ticket):
            return False
        failure = _C.error_of(engine, self.ticket)
        if failure is not None:
            kind, text = failure
            self.error = MemoryError(text) if kind == "MemoryError" else describe(kind, text)
            _C.forget(engine, self.ticket)
        self.ended = True
        return True


class Background:
    """The methods of `pycoll.runtime.sessions.session.Session` for the queue of its engine."""

    _engine: Any
    engine: Any
    memory: Any
    guard: Any
    error: Any
    interrupted: Any

    def _open_queue(self) -> None:
        self._in_flight: deque[Flight] = deque()  # in the order of the queue
        self._adrift: list[Any] = []  # what calls need that may be in the queue, or may be not

    def _enqueue(self, prepared: Prepared, *args: Any) -> Work:
        """Put a call in the queue; ``args`` are for the engine."""
        flight = Flight()
        flight.keep, flight.result = prepared, prepared.result
        try:
            self._in_flight.append(flight)
            flight.ticket = self.guard(self.engine.submit, prepared.binding, *args)
            for mirror in prepared.registered:
                self.memory.lend(mirror, self.engine, flight.ticket)
            return self._queued(flight)
        except CollError:
            flight.ended = flight.ticket is None  # the engine has not taken it
            raise
        except BaseException as error:  # a signal handler's: it ends the communicator, as in a call
            self._adrift.append((prepared, self.memory.hold(prepared.registered)))
            flight.ended = flight.ticket is None
            self.interrupted(error)
            raise

    def _queued(self, flight: Flight) -> Work:
        """Return the work of a call that is in the queue."""
        self.sweep()
        return Work(self, flight)

    def sweep(self) -> None:
        """Let go of the arrays of calls that have ended; any thread may, while others do."""
        engine = self._engine
        while self._in_flight and engine is not None:
            try:
                flight = self._in_flight[0]
                if not flight.land(engine, self.error):
                    return
                self._let_go(flight)
                self._in_flight.remove(flight)
            except (IndexError, ValueError):
                continue  # another thread has removed it

    def _let_go(self, flight: Flight) -> None:
        flight.keep = None

    def _empty_queue(self) -> None:
        """Forget all calls of an engine that has been closed."""
        self.sweep()
        self._in_flight.clear()
        self._adrift.clear()

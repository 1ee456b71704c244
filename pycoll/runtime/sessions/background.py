"""Calls in the background: the part of a session that queues them and lets go of their arrays."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from pycoll.errors import CollError, PeerLeft
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.runtime.calls.prepared import Prepared
from pycoll.runtime.calls.work import QueuedCall, Work


class QueuedCalls:
    """The methods of `pycoll.runtime.sessions.session.Session` behind ``async_op``."""

    memory: Memory
    engine: Any
    guard: Any
    error: Any
    interrupted: Any
    _engine: Any
    rank: int
    has_raised: bool
    _in_flight: deque[QueuedCall]
    _failed_call: QueuedCall | None = None  # the first that has failed
    _adrift: list[Any]

    def _enqueue(self, prepared: Prepared, *args: Any) -> Work:
        """Put a call in the queue; ``args`` are for the engine."""
        queued = QueuedCall()
        queued.keep, queued.result = prepared, prepared.result
        try:
            self._in_flight.append(queued)
            queued.ticket = self.guard(self.engine.submit, prepared.binding, *args)
            for part in prepared.registered:
                self.memory.lend(part, self.engine, queued.ticket)
            return self._queued(queued)
        except CollError:
            queued.ended = queued.ticket is None  # the engine has not taken it
            raise
        except BaseException as error:  # a signal handler's: it ends the communicator, as in a call
            self._adrift.append((prepared, self.memory.hold(prepared.registered)))
            queued.ended = queued.ticket is None
            self.interrupted(error)
            raise

    def _queued(self, queued: QueuedCall) -> Work:
        """Return the work of a call that is in the queue."""
        if len(self._in_flight) > 1:
            self.sweep()
        return Work(self, queued)

    def sweep(self) -> None:
        """Let go of the arrays of calls that have ended; any thread may, while others do."""
        engine = self._engine
        while self._in_flight and engine is not None:
            try:
                queued = self._in_flight[0]
                if not (queued.ended or queued.take_outcome(engine, self.error)):
                    return
                self._let_go(queued)
                self._in_flight.remove(queued)
            except (IndexError, ValueError):
                continue  # another thread has removed it

    def _let_go(self, queued: QueuedCall) -> None:
        queued.let_go()
        if queued.error is not None and self._failed_call is None:
            self._failed_call = queued

    def tell_of_failures(self) -> None:
        """Say on stderr what a call has failed with that nobody waits for any more.

        Nothing is said where the peers have ended as well, without joining it.
        """
        failed, self._failed_call = self._failed_call, None
        error = None if failed is None or self.has_raised else failed.error
        if error is not None and not isinstance(error, PeerLeft) and sys.stderr is not None:
            sys.stderr.write(
                f"pycoll: rank {self.rank} ended without wait() for a call in the background that "
                f"has failed: {type(error).__name__}: {error}\n"
            )

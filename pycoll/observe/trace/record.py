"""Writing a trace: the engine notes each call, and a thread moves the notes to disk."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import IO, Any

from pycoll import _C
from pycoll.config import VERSION
from pycoll.errors import ArgumentError, CollError
from pycoll.observe.causes import find_causes
from pycoll.observe.counters.stats import Counts, by_collective, own_sight
from pycoll.observe.processes import read
from pycoll.observe.status import status
from pycoll.observe.trace.files import FORMAT, clock_of_host
from pycoll.observe.trace.writer import writer_of_process
from pycoll.runtime.sessions.reports import raising

_CAPACITY = 1 << 16  # calls
_LONG_S = 0.6  # a wait after which a rank looks around,
_LOOK_S = 0.2  # for so long


class Tracer:
    """Writes the calls of one session to a folder until it is stopped.

    Args:
        session: A session on any transport.
        folder: Where the files go; it is made.
        marks: Addresses of functions around each call; see `Marks` of csrc/engine/trace.h.

    Raises:
        ArgumentError: If the folder cannot be written.
    """

    def __init__(
        self, session: Any, folder: str | os.PathLike[str], marks: tuple[int, int] = (0, 0)
    ) -> None:
        self._session = weakref.ref(session)
        self._engine, self._sites, self._heap = session.runner, session.sites, session.memory
        api = session.job.api if session.control is None else None
        self._links = getattr(api, "links", None)
        self._pid = os.getpid()
        self._writer = writer_of_process()
        self._trace = raising(_C.Trace, _CAPACITY, *marks, self._writer.bell)
        self._known: set[int] = set()
        self._messages: list[list[Any]] = []
        self._began = self._next_look = time.monotonic()
        self._used = -1  # bytes of symmetric memory, as noted
        self._fresh = True  # something has been noted that is not on disk
        self._closed = False
        self._long_s, self._rest_until = _LONG_S, 0.0
        self._lock = threading.RLock()
        self._lost = self._lost_at = 0  # calls, as noted, and where
        self._calls, self._notes = self._open(session, Path(folder))
        self._file = self._calls.fileno()  # -1: no more is written
        session.guard(self._engine.trace, self._trace)
        for way in ("send", "recv"):
            setattr(session, way, self._timed(way))
        session.serve_messages(False)
        self._writer.add(self)
        atexit.register(self.flush)

    def _open(self, session: Any, folder: Path) -> tuple[IO[bytes], IO[str]]:
        members = session.job_ranks or session.members or range(session.world_size)
        rank = members[session.rank]
        key = session.cookie
        host, clock = clock_of_host()
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        head = {
            "pycoll_trace": FORMAT,
            "version": VERSION,
            "rank": rank,
            "place": session.rank,
            "world_size": session.world_size,
            "members": list(members),
            "communicator": f"{key:016x}",
            "pid": self._pid,
            "host": host,
            "clock": clock,
            "command": " ".join(sys.argv),
            "tuned": _tuned(session) if session.rank == 0 else [],
            "realtime": [(before + after) // 2, real, (after - before) // 2 + 1],
        }
        name = f"rank{rank}-{key:016x}-{before}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            calls = open(folder / f"{name}.calls", "wb", buffering=0)
            notes = open(folder / f"{name}.jsonl", "w", encoding="utf-8")
            notes.write(json.dumps(head) + "\n")
            self._lost_at = notes.tell()
            notes.write(_lost_line(0))
            notes.flush()  # the rank may be stopped from now on
        except OSError as error:
            raise ArgumentError(f"cannot write a trace to {str(folder)!r}: {error}") from None
        return calls, notes

    def _timed(self, way: str) -> Any:
        """Return the method of a session that sends or receives, with a note of every call."""
        session = self._session
        messages = self._messages

        def call(x: Any, peer: int, tag: int, timeout: float | None) -> Any:
            own = session()
            begin = time.monotonic_ns()
            try:
                return getattr(type(own), way)(own, x, peer, tag, timeout)
            finally:
                nbytes = getattr(x, "nbytes", 0)
                messages.append([way, begin, time.monotonic_ns() - begin, peer, tag, int(nbytes)])

        return call

    def move(self) -> None:
        """Move the calls to disk."""
        if not self._trace.empty:
            with self._lock:
                self._fresh = True
                self._trace.write(self._file)

    def flush(self) -> None:
        """Move all that has been noted to disk, or give up."""
        if os.getpid() != self._pid:
            return
        try:
            self.move()
            if self._fresh or self._messages:
                with self._lock, contextlib.suppress(ValueError):  # the files are closed
                    self._flush_notes()
        except OSError as error:
            self.give_up(error)

    def _flush_notes(self) -> None:
        self._fresh = False
        if self._trace.lost != self._lost:  # in place: there is room for it on a full disk, too
            self._lost = self._trace.lost
            os.pwrite(self._notes.fileno(), _lost_line(self._lost).encode(), self._lost_at)
        for number, text in self._sites.texts().items():
            if number not in self._known:
                self._known.add(number)
                self._note({"site": number, "text": text})
        while self._messages:
            self._note({"message": self._messages.pop(0)})
        self._notes.flush()

    def look(self) -> None:
        """Note memory and connections, less and less often, and who is to blame for a long wait."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + (now - self._began) / 4
            with self._lock, contextlib.suppress(ValueError):
                self._note_system()
        self._look_around()

    def _look_around(self) -> None:
        """Note who is to blame if this rank waits long, and again when that has doubled."""
        session = self._session()
        own = own_sight(session) if session is not None else None
        waited_s = max(own["waiting_s"], own["message_s"]) if own is not None else 0.0
        if waited_s < self._long_s:
            self._long_s = _LONG_S if waited_s < _LONG_S else self._long_s
            return
        begin = time.monotonic()
        if begin < self._rest_until:
            return
        self._long_s = 2 * waited_s
        for finding in find_causes(status(self._pid, _LOOK_S)):
            if finding.waited_s:
                with self._lock, contextlib.suppress(ValueError):  # the files are closed
                    self._note({"held": finding.as_json()})
                break
        # If all ranks do so all the time, as much as one rank that looks: the job is to go on.
        now = time.monotonic()
        self._rest_until = now + session.world_size * max(0.0, now - begin - _LOOK_S)
        self.flush()

    def _note_system(self) -> None:
        """Note memory, which one communicator does for all of a process, and connections."""
        heap = self._heap.heap
        used = heap.usage(self._heap.region)[0] if heap is not None else 0
        if used != self._used or self._writer.leads(self):
            process, now = read(self._pid), time.monotonic_ns()
            if process is not None:
                self._used = used
                own = [process.rss_bytes, used, process.swap_bytes, process.faults]
                self._note({"memory": [now, *own, process.ready_s, process.cores]})
        if self._links is not None:
            self._note({"links": self._links()})

    def note_step(self, samples: int, waited_s: float | None) -> None:
        """Note how many samples this rank had in a step of training, and how long it waited."""
        with self._lock, contextlib.suppress(ValueError):  # the files are closed
            self._note({"step": [time.monotonic_ns(), samples, waited_s]})

    def note_device(self, row: list[Any]) -> None:
        """Note a call on a device; see `Stream.device`."""
        with self._lock, contextlib.suppress(ValueError):  # the files are closed
            self._note({"device": row})

    def counted(self) -> dict[str, Counts]:
        """Return what has been counted so far, by collective."""
        self.flush()
        with self._lock:
            return by_collective(self._trace)

    def _note(self, value: dict[str, Any]) -> None:
        if self._file >= 0:
            self._notes.write(json.dumps(value) + "\n")
            self._fresh = True

    def stop(self) -> None:
        """Trace no more calls, and close the files."""
        session = self._session()
        if session is not None and os.getpid() == self._pid:
            for way in ("send", "recv"):
                session.__dict__.pop(way, None)
            session.serve_messages(True)
            with contextlib.suppress(CollError, _C.EngineError):  # it is closed
                session.guard(self._engine.trace, None)
        self.close()

    def give_up(self, error: OSError) -> None:
        """Count all further calls as lost, and say why: the disk is full, say."""
        with self._lock:
            if self._file < 0:  # it has been said
                return
            with contextlib.suppress(OSError, ValueError):
                self._flush_notes()  # of the calls that are written
            self._file = -1
        warnings.warn(f"a trace ends early, for it cannot be written: {error}", stacklevel=2)

    def close(self) -> None:
        """Write the rest and close the files; the communicator is closed."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        if sys.is_finalizing():  # this thread is the last one
            self._lock = threading.RLock()
        atexit.unregister(self.flush)
        with self._lock, contextlib.suppress(CollError, _C.EngineError, OSError, ValueError):
            self._note_system()  # at the end, too
        self._writer.remove(self)
        self.flush()
        with self._lock:  # nobody is writing to what others may open in their place
            for file in (self._calls, self._notes):
                try:
                    file.close()
                except OSError as error:
                    self.give_up(error)
            self._file = -1


def _lost_line(calls: int) -> str:
    return f'{{"lost": {calls:20}}}\n'


def _tuned(session: Any) -> list[list[Any]]:
    """Return what `pycoll tune` has measured for ranks in these places."""
    world = session.tuning.world(session.place) if session.tuning is not None else None
    times = world.times if world is not None else ()
    return [[t.collective, t.nbytes, t.symmetric, t.algorithm, t.seconds] for t in times]

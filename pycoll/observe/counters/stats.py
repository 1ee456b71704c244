"""Counters of a communicator: read where they lie, when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pycoll import _C
from pycoll.runtime.calls.descriptors import Call
from pycoll.types import type_bytes

BUCKETS_S: tuple[float, ...] = tuple(
    ns / 1e9 for ns in _C.Trace.up_to_ns
)  # upper ends of the histogram


@dataclass
class Counts:
    """The calls of one collective, since tracing began.

    Attributes:
        calls, nbytes: How many, and the bytes of their arrays.
        seconds, waited_s: Time in them; of that, for peers.
        failed: How many raised.
        histogram: How many took at most `BUCKETS_S` each; the last entry has all others.
    """

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    failed: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))


@dataclass(frozen=True)
class Stats:
    """What a rank knows of one communicator.

    Attributes:
        rank, world_size, transport: Of the communicator.
        calls: Calls that this rank has begun.
        errors: Exceptions that the engine has raised here.
        symmetric_bytes, kept_bytes: Symmetric memory of this rank in arrays, and freed memory that
            waits to be used again.
        waits_for: The rank that it waits for just now, or None; for other threads to ask.
        waited_s: For how long.
        collectives: Counts by collective, while calls are traced; else empty.
    """

    rank: int
    world_size: int
    transport: str
    calls: int
    errors: int
    symmetric_bytes: int
    kept_bytes: int
    waits_for: int | None
    waited_s: float
    collectives: dict[str, Counts]


def own_sight(session: Any, calls: int = 0) -> dict[str, Any] | None:
    """Return what this rank shows of itself, as `RankSight` of csrc/memory/sight.h.

    None where the system had no memory for it.
    """
    if session.control is not None:
        return session.control.sight().rank(session.rank, calls)
    return session.engine.look(calls)


def read(session: Any) -> Stats:
    """Read the counters of a session."""
    engine, memory, watcher = session.engine, session.memory, session.observer
    own = own_sight(session)
    heap = memory.heap if memory is not None else None
    used, kept = heap.usage(memory.region) if heap is not None else (0, 0)
    peer, waited_s, calls = -1, 0.0, engine.iteration
    if own is not None:
        peer, waited_s, calls = own["waiting_peer"], own["waiting_s"], own["call_seq"]
    return Stats(
        session.rank,
        session.world_size,
        session.transport,
        calls,
        watcher.errors if watcher is not None else 0,
        used,
        kept,
        peer if peer >= 0 else None,
        waited_s,
        watcher.collectives() if watcher is not None else {},
    )


def by_collective(trace: _C.Trace) -> dict[str, Counts]:
    """Return what a trace has counted, by collective."""
    found: dict[str, Counts] = {}
    for descriptor, calls, elements, failed, total_ns, waited_ns, by_time in trace.counts():
        what = Call.unpack(descriptor, 0)
        own = found.setdefault(what.kind, Counts())
        own.calls += calls
        own.nbytes += elements * type_bytes(what.dtype)
        own.seconds += total_ns / 1e9
        own.waited_s += waited_ns / 1e9
        own.failed += failed
        own.histogram = [a + b for a, b in zip(own.histogram, by_time, strict=True)]
    return found

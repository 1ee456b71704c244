"""A trace of all ranks, on one clock: who entered each call when, and who came last.

Processes of one host read one clock, so their times need no correction. Clocks of other hosts are
put right by what a call proves: nobody leaves it before everybody has entered it. Every call of a
common communicator bounds the difference of two clocks from both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.observe.trace.files import Stream, read

_TICK_NS = 1_000  # what one clock of one host may be off by between its cores, at most
_UNKNOWN_NS = 1e9  # of hosts without a call in common


@dataclass
class Group:
    """A communicator: its calls as arrays of [rank, call], nan where a rank did not make one.

    Attributes:
        name: What tells it from others.
        members: Rank in the job of each of its ranks.
        streams: What each of them has written; None for one that has written nothing.
        iteration: Of each call, the same on every rank.
        enter_ns, leave_ns, waited_ns: Times of each rank, on the common clock.
        descriptor, count, site: What was called, and where, by the first rank that did.
        failed: Whether a rank raised.
    """

    name: str
    members: list[int]
    streams: list[Stream | None]
    iteration: np.ndarray
    enter_ns: np.ndarray
    leave_ns: np.ndarray
    waited_ns: np.ndarray
    descriptor: np.ndarray
    count: np.ndarray
    site: list[str]
    failed: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Place of the rank that entered each call last."""
        return np.nanargmax(np.where(np.isnan(self.enter_ns), -np.inf, self.enter_ns), axis=0)

    @property
    def late_ns(self) -> np.ndarray:
        """How much later that was than the next to last rank, for each call."""
        if len(self.members) < 2 or not self.iteration.size:
            return np.zeros(self.iteration.size)
        times = np.sort(np.where(np.isnan(self.enter_ns), -np.inf, self.enter_ns), axis=0)
        late = times[-1] - times[-2]
        return np.where(np.isfinite(late), late, 0.0)


@dataclass
class Merged:
    """All that a job has written.

    Attributes:
        folder: Where it lies.
        groups: Its communicators, the largest first.
        streams: All streams.
        shift_ns: What was added to the times of each stream.
        clock_error_ns: By how much times of two ranks may be off against each other.
        clock: How that is known, in words.
        begin_ns, end_ns: First and last time in it.
    """

    folder: str
    groups: list[Group]
    streams: list[Stream]
    shift_ns: dict[int, float]
    clock_error_ns: float
    clock: str
    begin_ns: float
    end_ns: float

    @property
    def device_error_ns(self) -> float:
        """By how much times on devices may be off against the clocks of their hosts; 0: none."""
        return max((row[-1] for stream in self.streams for row in stream.device), default=0.0)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written something."""
        return sorted({stream.rank for stream in self.streams})


def merge(folder: str | Path) -> Merged:
    """Read a trace and put it on one clock.

    Raises:
        ArgumentError: If there is none in the folder.
    """
    streams = read(folder)
    zero = min(int(s.head["realtime"][0]) for s in streams)
    by_name: dict[str, list[Stream]] = {}
    for stream in streams:
        by_name.setdefault(stream.head["communicator"], []).append(stream)
    if not any(stream.calls.size or stream.messages for stream in streams):
        raise ArgumentError(f"the trace in {str(folder)!r} has no calls")
    shift, error, words = _clocks(streams, by_name, zero)
    groups = [_group(name, own, shift, zero) for name, own in by_name.items()]
    groups.sort(key=lambda g: (-len(g.members), g.name))
    times = [t for g in groups for t in (g.enter_ns, g.leave_ns) if t.size]
    rows = [
        (m[1] - zero + shift[id(s)], m[1] + m[2] - zero + shift[id(s)])
        for s in streams
        for m in s.messages
    ]
    begin = min([float(np.nanmin(t)) for t in times] + [a for a, _ in rows])
    end = max([float(np.nanmax(t)) for t in times] + [b for _, b in rows])
    shift = {key: value - zero for key, value in shift.items()}
    return Merged(str(folder), groups, streams, shift, error, words, begin, end)


def _group(name: str, streams: list[Stream], shift: dict[int, float], zero: int) -> Group:
    members = list(streams[0].head["members"])
    rows: list[list[Stream]] = [[] for _ in members]
    for stream in streams:
        rows[stream.head["place"]].append(stream)
    whole = {id(s): unwrapped(s) for s in streams}
    iteration = np.unique(np.concatenate([whole[id(s)] for s in streams]))
    shape = len(members), iteration.size
    enter, leave, waited = (np.full(shape, np.nan) for _ in range(3))
    descriptor, count = (np.zeros(iteration.size, np.uint64) for _ in range(2))
    site, failed = [""] * iteration.size, np.zeros(iteration.size, bool)
    for place in reversed(range(len(members))):
        for stream in rows[place]:
            calls = stream.calls
            at = np.searchsorted(iteration, whole[id(stream)])
            first = calls["enter_ns"].astype(np.int64) - zero + shift[id(stream)]
            enter[place, at] = first
            leave[place, at] = first + calls["total_ns"]
            waited[place, at] = calls["waited_ns"]
            descriptor[at], count[at] = calls["descriptor"], calls["count"]
            failed[at] |= (calls["site"] & 0x8000) != 0
            texts = [stream.sites.get(int(i), "") for i in calls["site"] & 0x7FFF]
            for k, text in zip(at.tolist(), texts, strict=True):
                site[k] = text
    kept = [row[0] if row else None for row in rows]
    return Group(
        name, members, kept, iteration, enter, leave, waited, descriptor, count, site, failed
    )


def unwrapped(stream: Stream) -> np.ndarray:
    """Return the iterations of the calls of a rank, written modulo 2^32, as they were."""
    numbers = stream.calls["iteration"].astype(np.float64)
    return np.unwrap(numbers, period=2.0**32).astype(np.int64)


def _clocks(
    streams: list[Stream], by_name: dict[str, list[Stream]], zero: int
) -> tuple[dict[int, float], float, str]:
    """Return what to add to the times of each stream, the error of that, and how it is known."""
    clocks: dict[str, list[Stream]] = {}
    for stream in streams:
        clocks.setdefault(stream.head["clock"], []).append(stream)
    first, *others = clocks
    shift = {id(s): 0.0 for s in clocks[first]}
    if not others:
        return shift, _TICK_NS, "one clock for all ranks: the monotonic clock of their host"
    error, words = float(_TICK_NS), "calls, which nobody leaves before everybody has entered them"
    for clock in others:
        low, high = -np.inf, np.inf
        for own in by_name.values():
            ours = [s for s in own if s.head["clock"] == clock]
            known = [s for s in own if id(s) in shift]
            for a in known:
                for b in ours:
                    lo, hi = _bounds(a, b, shift[id(a)], zero)
                    low, high = max(low, lo), min(high, hi)
        if np.isfinite(low) and np.isfinite(high):
            add, half = (low + high) / 2, abs(high - low) / 2
        else:  # no call in common: what the hosts hold for the time of day
            (mono_a, real_a, _), (mono_b, real_b, _) = (
                s.head["realtime"] for s in (clocks[first][0], clocks[clock][0])
            )
            add, half = float((real_b - mono_b) - (real_a - mono_a)), _UNKNOWN_NS
            words = "the time of day of the hosts: some have no call in common"
        error = max(error, half)
        shift |= {id(s): add for s in clocks[clock]}
    return shift, error, words


def _bounds(a: Stream, b: Stream, shift_a: float, zero: int) -> tuple[float, float]:
    """Bound what must be added to the times of b, by the calls that it has in common with a."""
    common, at_a, at_b = np.intersect1d(unwrapped(a), unwrapped(b), return_indices=True)
    if not common.size:
        return -np.inf, np.inf
    enter_a = a.calls["enter_ns"][at_a].astype(np.int64) - zero + shift_a
    enter_b = b.calls["enter_ns"][at_b].astype(np.int64) - zero
    leave_a = enter_a + a.calls["total_ns"][at_a]
    leave_b = enter_b + b.calls["total_ns"][at_b]
    return float(np.max(enter_a - leave_b)), float(np.min(leave_a - enter_b))

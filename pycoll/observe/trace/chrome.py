"""A trace as Perfetto and chrome://tracing open it.

The format is Google's "Trace Event Format", as JSON: complete events (``X``), metadata (``M``),
counters (``C``) and flow events (``s``, ``f``) for the arrows.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pycoll.observe.trace.merged import Group, Merged
from pycoll.runtime.calls.descriptors import Call
from pycoll.types import type_bytes

FILE = "trace.json.gz"
_JOB = 1  # number of the process: that of no thread, which would come first
_LATE_NS = 20_000  # from where on an arrow shows who was waited for


def write(trace: Merged, path: str | Path) -> int:
    """Write the events of a trace and return the number of bytes."""
    note = {
        "clock": trace.clock,
        "clock_error_us": trace.clock_error_ns / 1e3,
        "device_clock_error_us": trace.device_error_ns / 1e3,
        "ranks": len(trace.ranks),
    }
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.write(b'{"displayTimeUnit":"ns","otherData":' + json.dumps(note).encode())
        packed.write(b',"traceEvents":[\n')
        sign = b""
        for event in events(trace):
            packed.write(sign + json.dumps(event, separators=(",", ":")).encode())
            sign = b",\n"
        packed.write(b"\n]}\n")
    return Path(path).stat().st_size


def events(trace: Merged) -> Iterator[dict[str, Any]]:
    """Yield the events: a process for the job, in it a thread for each rank of each communicator.

    Perfetto sorts threads by their numbers, and processes by how much is in them.
    """
    command = str(trace.streams[0].head.get("command") or "").split()
    yield _named("process_name", 0, {"name": Path(command[0]).name if command else "job"})
    arrows = itertools.count(1)  # Perfetto takes numbers only
    for number, group in enumerate(trace.groups, 1):
        tids = _tids(trace, number)
        for place, stream in enumerate(group.streams):
            if stream is not None:
                yield from _thread(group, number, group.members[place], tids)
        yield from _calls(group, tids)
        yield from _arrows(group, tids, arrows)
    yield from _messages(trace)
    yield from _device(trace)
    yield from _memory(trace)


def _tids(trace: Merged, number: int) -> int:
    """Return the number of rank 0's thread of a communicator; those of other ranks follow."""
    return number * int(10 ** max(3, len(str(max(trace.ranks)))))


def _thread(group: Group, number: int, rank: int, tids: int) -> Iterator[dict[str, Any]]:
    ranks = f"{len(group.members)} rank{'s' * (len(group.members) > 1)}"
    more = f", communicator {number} ({ranks})" if number > 1 else ""
    yield _named("thread_name", tids + rank, {"name": f"rank {rank}{more}"})
    yield _named("thread_sort_index", tids + rank, {"sort_index": tids + rank})


def _named(what: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _JOB, "tid": tid, "args": args}


def _calls(group: Group, tids: int) -> Iterator[dict[str, Any]]:
    words: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
    last = group.last.tolist() if group.iteration.size else []
    for k in range(group.iteration.size):
        key = int(group.descriptor[k]), int(group.count[k])
        if key not in words:
            words[key] = _words(*key)
        name, args = words[key]
        about = {**args, "site": group.site[k], "iteration": int(group.iteration[k])}
        if group.failed[k]:
            about["failed"] = True
        for place, rank in enumerate(group.members):
            if np.isnan(group.enter_ns[place, k]):
                continue
            begin, waited_until, end = _moments(group, place, k)
            tid = tids + rank
            yield _slice(name, "call", tid, begin, end, about)
            if waited_until > begin:  # in one piece: how it is spread over the call is not noted
                whom = {"last_to_enter": group.members[last[k]]}
                yield _slice("waits", "wait", tid, begin, waited_until, whom)
                yield _slice("moves", "move", tid, waited_until, end, {})


def _moments(group: Group, place: int, k: int) -> tuple[int, int, int]:
    """Return when a rank entered a call, had waited and left it, in whole ns, so that they fit."""
    begin = round(float(group.enter_ns[place, k]))
    end = max(begin, round(float(group.leave_ns[place, k])))
    waited = round(float(group.waited_ns[place, k]))
    return begin, begin + max(0, min(waited, end - begin - 1)), end


def _words(descriptor: int, count: int) -> tuple[str, dict[str, Any]]:
    what = Call.unpack(descriptor, count)
    nbytes = count * type_bytes(what.dtype)
    return what.kind, {"bytes": nbytes, "algorithm": what.algorithm, "call": str(what)}


def _slice(
    name: str, kind: str, tid: int, begin: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": _JOB, "tid": tid, **times, "args": args}


def _arrows(group: Group, tids: int, arrows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from the last to enter a call to each that waited for it.

    It ends where a rank had waited: Perfetto turns arrows round that end in a slice that has begun
    earlier than the one where they begin.
    """
    if not group.iteration.size:
        return
    last = group.last
    for k in np.flatnonzero(group.late_ns >= _LATE_NS).tolist():
        source = int(last[k])
        begin = round(float(group.enter_ns[source, k]))
        for place, rank in enumerate(group.members):
            if place == source or np.isnan(group.enter_ns[place, k]):
                continue
            _, end, _ = _moments(group, place, k)
            if end < begin:
                continue  # it has not waited for the last, or clocks are off
            flow = {"name": "last to enter", "cat": "wait", "pid": _JOB, "id": next(arrows)}
            late = tids + group.members[source]
            yield {"ph": "s", "tid": late, "ts": begin / 1e3, **flow}
            yield {"ph": "f", "bp": "e", "tid": tids + rank, "ts": end / 1e3, **flow}


def _messages(trace: Merged) -> Iterator[dict[str, Any]]:
    tids = {group.name: _tids(trace, number) for number, group in enumerate(trace.groups, 1)}
    for stream in trace.streams:
        tid = tids[stream.head["communicator"]] + stream.rank
        shift = trace.shift_ns[id(stream)]
        for way, begin, total, peer, tag, nbytes in stream.messages:
            args = {"peer": peer, "tag": tag, "bytes": nbytes}
            at = round(begin + shift)
            yield _slice(way, "message", tid, at, at + total, args)


def _device(trace: Merged) -> Iterator[dict[str, Any]]:
    """Yield what devices did: a thread for each of their streams."""
    known: dict[tuple[int, int], int] = {}
    for stream in trace.streams:
        shift = trace.shift_ns[id(stream)]
        for name, begin, total, nbytes, handle, launched, error in stream.device:
            if (stream.rank, handle) not in known:
                place = sum(rank == stream.rank for rank, _ in known)
                tid = _tids(trace, len(trace.groups) + 1 + place) + stream.rank
                known[stream.rank, handle] = tid
                words = f"rank {stream.rank}, device stream {handle:#x}"
                yield _named("thread_name", tid, {"name": words})
                yield _named("thread_sort_index", tid, {"sort_index": tid})
            at, args = round(begin + shift), {"bytes": nbytes, "clock_error_us": error / 1e3}
            args["after_launch_us"] = (begin - launched) / 1e3
            tid = known[stream.rank, handle]
            yield _slice(name, "device", tid, at, at + total, args)


def _memory(trace: Merged) -> Iterator[dict[str, Any]]:
    for stream in trace.streams:
        shift = trace.shift_ns[id(stream)]
        for when, process, symmetric, *_ in stream.memory:
            args = {"process": process, "symmetric": symmetric}
            yield {
                "ph": "C",
                "name": f"memory of rank {stream.rank}",
                "pid": _JOB,
                "ts": round((when + shift) / 1e3, 3),
                "args": args,
            }

"""Who waits for whom how much of the time: many quick looks at a job, between two that are whole.

They also tell what calls carry, how much of the time small ones take, and whether the memory of a
rank only grows.

Nothing on the side of the job counts that, for it would cost every call something.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from pycoll.observe.look import Group, Look
from pycoll.observe.processes import rss_bytes
from pycoll.runtime.calls.descriptors import Call
from pycoll.types import type_bytes

SMALL = 16 << 10  # bytes below which a call costs its latency, whatever it carries
_PAUSE_S = 0.005
_NOBODY = -2
_CALLS = 63  # that a look can see
_MEMORY_S = 0.04  # between two looks at memory
_STEPS, _MOSTLY = 4, 0.6  # looks at memory that tell of growth, and how many have to find more
_COST = 4  # a look may take this part of the time: one in so many


@dataclass
class Shares:
    """What the looks have seen.

    Attributes:
        looks: How many there were.
        waits: How often each rank waited for another one.
        blamed: How often each rank was the one at the end of a wait: for whom somebody waited, and
            who waited for nobody.
        small: How often each rank was in a call of at most `SMALL` bytes.
        traffic: Calls, and bytes of their arrays, by collective: those of one rank of each
            communicator.
        memory: Of each rank, rows of seconds and bytes of its process.
    """

    looks: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    blamed: dict[int, int] = field(default_factory=dict)
    small: dict[int, int] = field(default_factory=dict)
    traffic: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def of(self, rank: int, world_size: int) -> tuple[float, float, float, float]:
        """Return what `RankStatus` has of a rank: waiting, blamed, small and growth."""
        looks = max(1, self.looks)
        blamed = self.blamed.get(rank, 0) / (looks * max(1, world_size - 1))
        return (
            self.waits.get(rank, 0) / looks,
            blamed,
            self.small.get(rank, 0) / looks,
            self.growth(rank),
        )

    def growth(self, rank: int) -> float:
        """Return by how many bytes per second the memory of a rank grew; 0 if it did not always."""
        rows = self.memory.get(rank, [])
        steps = [b[1] - a[1] for a, b in itertools.pairwise(rows)]
        if len(steps) < _STEPS or min(steps) < 0 or sum(map(bool, steps)) < _MOSTLY * len(steps):
            return 0.0
        return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])

    def count(self, before: int, own: dict[str, Any]) -> None:
        """Count the calls of a rank after that of number `before`; the look sees the newest."""
        new = [call for call in own["calls"] if call["call_seq"] > before]
        for call in new:
            what, nbytes = _carries(call)
            row = self.traffic.setdefault(what.kind, [0.0, 0.0])
            times = (own["call_seq"] - before) / len(new)  # each stands for some that were not seen
            row[0] += times
            row[1] += times * nbytes

    def add(self, edges: dict[int, int]) -> None:
        """Count one look: for whom each waiting rank waits."""
        self.looks += 1
        for rank in edges:
            self.waits[rank] = self.waits.get(rank, 0) + 1
            at, path = rank, {rank}
            while at in edges and edges[at] not in path:
                at = edges[at]
                path.add(at)
            if at not in edges:
                self.blamed[at] = self.blamed.get(at, 0) + 1


def watch(seen: Look, seconds: float) -> Shares:
    """Look at a job for some time."""
    shares, until = Shares(), time.monotonic() + seconds
    sights = list(zip(seen.groups, seen.job.segments, strict=False))
    leaders = {group.key: _leader(group) for group in seen.groups}
    made: dict[int, int] = {}  # calls of the rank that is counted, by communicator
    next_memory = 0.0
    while (left := until - time.monotonic()) > 0:
        begin = time.monotonic()
        edges: dict[int, int] = {}
        small = set()
        for group, segment in sights:
            for place, rank in enumerate(group.members):
                counted = rank == leaders[group.key]
                own = segment.sight.rank(place, _CALLS if counted else 1)
                if counted:
                    shares.count(made.get(group.key, own["call_seq"]), own)
                    made[group.key] = own["call_seq"]
                peer = _awaited(group, own)
                if rank >= 0 and peer >= 0:
                    edges[rank] = peer
                if own["calls"] and _is_small(own["calls"][-1]):
                    small.add(rank)
        shares.add(edges)
        for rank in small:
            shares.small[rank] = shares.small.get(rank, 0) + 1
        if begin >= next_memory:
            next_memory = begin + _MEMORY_S
            for rank, process in enumerate(seen.processes):
                if process is not None and (nbytes := rss_bytes(process.pid)):
                    shares.memory.setdefault(rank, []).append((begin, nbytes))
        pause = max(_PAUSE_S, _COST * (time.monotonic() - begin))
        time.sleep(max(0.0, min(pause, left)))
    return shares


def _leader(group: Group) -> int:
    """Return a rank of this host that makes the calls of a communicator; `_NOBODY` if none."""
    there = zip(group.members, group.ranks, strict=True)
    return next((m for m, own in there if m >= 0 and own["pid"] and not group.stages), _NOBODY)


def _is_small(call: dict) -> bool:
    """Whether a rank is in a call, and that carries little."""
    if call["done"]:
        return False
    what, nbytes = _carries(call)
    return what.kind != "barrier" and nbytes <= SMALL


def _carries(call: dict) -> tuple[Call, int]:
    """Return a call, and the bytes of its arrays."""
    what = Call.unpack(call["descriptor"], call["count"])
    return what, what.count * type_bytes(what.dtype)


def _awaited(group: Group, own: dict[str, Any]) -> int:
    if own["waiting_peer"] >= 0 and not own["arrived"]:
        return group.members[own["waiting_peer"]]
    if own["message_way"] and own["message_peer"] >= 0:
        return group.members[own["message_peer"]]
    return -1

"""One look at a running job: what its ranks have published, and what the kernel says of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pycoll.observe.boards import Boards
from pycoll.observe.find import Job, find, heap_bytes
from pycoll.observe.processes import Process, command_of, read

ABSENT, RUN, LEFT, CLOSED = range(4)  # Phase of csrc/memory/control.h


@dataclass(frozen=True)
class Group:
    """A communicator at one moment.

    Attributes:
        key: Tells it from others.
        members: Rank in the job of each of its ranks; -1 for one that is not there yet.
        ranks: What each has published; see `RankSight` of csrc/memory/sight.h.
        failure: What has ended it, or None.
        stages: Whether it only runs stages of the calls of another one, inside a host.
    """

    key: int
    members: list[int]
    ranks: list[dict[str, Any]]
    failure: dict[str, Any] | None
    stages: bool = False


@dataclass(frozen=True)
class Look:
    """A job at one moment.

    Attributes:
        number: What names it; see `pycoll.observe.find.Job`.
        command: Command line of its launcher, or of its first rank.
        when: Reading of the monotonic clock, in seconds.
        groups: Its communicators; the first has all ranks.
        processes: That of each rank, as far as it is there.
        heap_bytes: Symmetric memory of each rank.
        links: By rank and peer, what the system of a rank knows of its connections.
        job: The job, to look at it again.
    """

    number: int
    command: str
    when: float
    groups: list[Group]
    processes: list[Process | None]
    heap_bytes: list[int]
    links: dict[int, dict[int, dict[str, int]]]
    job: Job

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self.groups[0].ranks)


def look(number: int | None = None, calls: int = 1, key: int | None = None) -> Look:
    """Look at a job without touching it.

    Args:
        number: Process of its launcher or of a rank; by default the only job of this user.
        calls: How many calls of each rank to read, at most 63.
        key: What names the job on all its hosts, in place of the process.

    Raises:
        ArgumentError: If there is no such job.
    """
    job = find(number, key)
    world = job.segments[0].pids
    here = [pid for pid in world if pid]
    apart = len(set(here)) == len(here)  # not ranks that are threads of one process
    place = {pid: rank for rank, pid in enumerate(world) if pid}
    inner = set().union(*(s.sight.inside for s in job.segments if isinstance(s.sight, Boards)))
    groups = []
    for i, segment in enumerate(job.segments if apart else job.segments[:1]):
        n = segment.sight.world_size
        ranks = [segment.sight.rank(r, calls) for r in range(n)]
        members = list(range(n)) if i == 0 else [place.get(r["pid"], -1) for r in ranks]
        sight = segment.sight
        stages = sight.cookie in inner
        groups.append(Group(sight.cookie, members, ranks, sight.failure, stages))
    processes = [_alive(rank) for rank in groups[0].ranks]
    return Look(
        job.number,
        command_of(job.number),
        time.monotonic(),
        groups,
        processes,
        heap_bytes(job.heap, len(world)),
        {b.rank: b.links() for b in job.links if b.world_size == len(world)},
        job,
    )


def _alive(rank: dict[str, Any]) -> Process | None:
    process = read(rank["pid"]) if rank["pid"] and not rank["over"] else None
    return process if process is not None and process.started == rank["starttime"] else None

"""Finding the jobs of this user: by the shared memory that their processes have open.

That memory has no name in the file system, but ``/proc/PID/fd`` shows it to its user. Every rank
keeps a descriptor of the control memory of each communicator, and so does ``pycoll run``. Ranks
that reach each other by messages keep one of their board instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.observe.boards import Boards, gather
from pycoll.observe.processes import command_of, read

_CONTROL, _HEAP, _BOARD = (f"/memfd:pycoll-{name}" for name in ("control", "heap", "board"))


@dataclass
class Segment:
    """The memory of one communicator, mapped for reading, and whose it is."""

    inode: tuple[int, int]
    sight: _C.Sight | Boards
    pids: list[int]  # of its ranks; 0 where none has come yet


@dataclass
class Job:
    """Processes that have communicators in common.

    Attributes:
        segments: Their communicators; the first has all ranks.
        launcher: The process that has started the ranks, or 0.
        heap: A path to the symmetric heap in /proc, or None.
        links: What ranks show of their connections.
    """

    segments: list[Segment]
    launcher: int = 0
    heap: str | None = None
    links: list[_C.BoardSight] = field(default_factory=list)
    holders: set[int] = field(default_factory=set)

    @property
    def pids(self) -> set[int]:
        """The processes of its ranks."""
        return {pid for segment in self.segments for pid in segment.pids if pid}

    @property
    def number(self) -> int:
        """What names the job: the launcher's process, or that of the first rank that is there."""
        here = (pid for segment in self.segments for pid in segment.pids if pid)
        return self.launcher or next(here, min(self.holders, default=0))


def jobs() -> list[Job]:
    """Return the jobs of this user on this host, in the order of their numbers."""
    controls: dict[tuple[int, int], list[tuple[int, str]]] = {}
    heaps: dict[int, str] = {}
    boards: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for pid, path, target in _descriptors():
        if target.startswith(_HEAP):
            heaps[pid] = path
        elif target.startswith((_CONTROL, _BOARD)):
            places = controls if target.startswith(_CONTROL) else boards
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                places.setdefault((stat.st_dev, stat.st_ino), []).append((pid, path))
    found: list[Job] = []
    shown = [board for places in boards.values() if (board := _open(places, _C.BoardSight))]
    for one in gather(shown):
        pids = [one.rank(r, 0)["pid"] for r in range(one.world_size)]
        _add(found, Segment((0, one.cookie), one, pids), set(filter(None, pids)))
    for inode, places in controls.items():
        sight = _open(places, _C.Sight)
        if sight is not None:
            pids = [sight.rank(r, 0)["pid"] for r in range(sight.world_size)]
            _add(found, Segment(inode, sight, pids), {pid for pid, _ in places})
    for job in found:
        job.segments.sort(key=lambda s: (-s.sight.world_size, s.inode))
        job.links = [b for b in shown if not b.cookie and b.look(0)["pid"] in job.pids]
        parents = [process.parent for pid in job.pids if (process := read(pid))]
        job.launcher = next((pid for pid in parents if pid in job.holders - job.pids), 0)
        job.heap = next((heaps[pid] for pid in sorted(job.pids) if pid in heaps), None)
    return sorted(found, key=lambda job: job.number)


def find(number: int | None = None, key: int | None = None) -> Job:
    """Return the job that a process belongs to, as its launcher or a rank; by default the only one.

    Args:
        number: The process; one that has started the ranks' launcher will do.
        key: In its place, the cookie of the job's communicator, which is the same on all its hosts.

    Raises:
        ArgumentError: If there is none, or several; the text tells their numbers.
    """
    known = jobs()
    if key is not None:
        for job in known:
            if job.segments[0].sight.cookie == key:
                return job
        raise ArgumentError(f"no rank of the job {key:016x} runs here")
    if number is None:  # what only a child of a dead rank holds is not meant
        known = [job for job in known if job.pids & job.holders] or known
        if len(known) == 1:
            return known[0]
    for job in known:
        if number is not None and number in {job.number, *job.pids, *job.holders}:
            return job
    below = [job for job in known if any(number in _ancestors(pid) for pid in job.pids)]
    if len(below) == 1:
        return below[0]
    lines = [f"  {job.number}  {command_of(job.number)}" for job in below or known]
    there = "\n".join(["there are:", *lines]) if known else "there is no job of this user here"
    if number is None or below:
        raise ArgumentError(f"which job? {there}" if known else there)
    raise ArgumentError(
        f"process {number} is no launcher or rank of a job whose ranks run this version of pycoll; "
        f"{there}"
    )


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, but for the first of all."""
    while (process := read(pid)) is not None and process.parent > 1:
        pid = process.parent
        yield pid


def _descriptors() -> Iterator[tuple[int, str, str]]:
    """Yield process, path and target of every descriptor of shared memory that may be looked at."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        folder = f"/proc/{entry}/fd"
        with contextlib.suppress(OSError):  # over, or another user's
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{folder}/{fd}")
                    if target.startswith("/memfd:pycoll-"):
                        yield int(entry), f"{folder}/{fd}", target


def _open(places: list[tuple[int, str]], kind: Any) -> Any:
    """Map memory for reading; None if it is another version's, or not laid out so far."""
    for _, path in places:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # over in the meantime
            continue
        try:
            return kind(fd)
        except _C.EngineError:
            return None
        finally:
            os.close(fd)
    return None


def _add(found: list[Job], segment: Segment, holders: set[int]) -> None:
    """Put a communicator to the job that has its processes, or make a job of it."""
    pids = {pid for pid in segment.pids if pid} or holders
    mine = [job for job in found if job.pids & pids or (job.holders & pids)]
    whole = Job([segment], holders=set(holders))
    for job in mine:
        found.remove(job)
        whole.segments += job.segments
        whole.holders |= job.holders
    found.append(whole)


def heap_bytes(path: str | None, ranks: int) -> list[int]:
    """Return the bytes that each rank's part of the symmetric heap really holds."""
    used = [0] * ranks
    if path is None:
        return used
    with contextlib.suppress(OSError):  # over in the meantime
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            stride = max(1, size // ranks)
            at = 0
            while at < size:
                begin = os.lseek(fd, at, os.SEEK_DATA)
                at = os.lseek(fd, begin, os.SEEK_HOLE)
                for rank in range(begin // stride, min(ranks - 1, (at - 1) // stride) + 1):
                    low, high = max(begin, rank * stride), min(at, (rank + 1) * stride)
                    used[rank] += high - low
        finally:
            os.close(fd)
    return used

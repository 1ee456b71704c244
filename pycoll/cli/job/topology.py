"""What the kernel says of sockets, NUMA nodes, shared caches and cores, and ranks bound to them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Place:
    """Where a processor is, from the outermost level to itself; ordered so that near ones meet.

    Attributes:
        socket: Number of its package.
        node: Its NUMA node.
        cache: Lowest processor of those that share its last-level cache.
        core: Lowest processor of its core.
        cpu: Its number.
    """

    socket: int
    node: int
    cache: int
    core: int
    cpu: int


def topology(system: Path = SYSTEM, allowed: Sequence[int] | None = None) -> list[Place]:
    """List the processors that this process may use, near ones next to each other.

    What the kernel does not tell is taken to be one of its kind: one socket, one node, one cache,
    and a core for each processor.

    Args:
        system: Folder with ``cpu`` and ``node``.
        allowed: Processors; by default those of `os.sched_getaffinity`.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _cpus(folder / "cpulist")
    }
    return sorted(_place(system / f"cpu/cpu{cpu}", cpu, nodes.get(cpu, 0)) for cpu in usable)


def _place(folder: Path, cpu: int, node: int) -> Place:
    socket = _text(folder / "topology/physical_package_id")
    caches = {
        int(level): min(_cpus(index / "shared_cpu_list"), default=0)
        for index in folder.glob("cache/index[0-9]*")
        if (level := _text(index / "level")).isdecimal()
    }
    last = caches[max(caches)] if caches else 0
    core = min(_cpus(folder / "topology/thread_siblings_list"), default=cpu)
    return Place(max(0, int(socket or 0)), node, last, core, cpu)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _cpus(path: Path) -> list[int]:
    """Read a list of processors such as ``0-3,8``; empty if there is none."""
    found: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", _text(path)):
        found += range(int(low), int(high or low) + 1)
    return found


def described(places: Sequence[Place]) -> str:
    """Say in a line how many there are of each level."""
    levels = (("socket", 1), ("NUMA node", 2), ("last-level cache", 3), ("core", 4), ("thread", 5))
    parts = []
    for name, depth in levels:
        keys = {(p.socket, p.node, p.cache, p.core, p.cpu)[:depth] for p in places}
        parts.append(f"{len(keys)} {name}{'s' * (len(keys) != 1)}")
    return ", ".join(parts)


def shares(places: Sequence[Place], ranks: int) -> list[set[int]]:
    """Return the processors of each rank: as many whole cores as there are, next to each other.

    Neighbouring ranks get neighbouring cores. Where there are more ranks than cores, several
    ranks share one.
    """
    cores: dict[tuple[int, ...], set[int]] = {}
    for place in places:
        key = place.socket, place.node, place.cache, place.core
        cores.setdefault(key, set()).add(place.cpu)
    sets, found = list(cores.values()), []
    for rank in range(ranks):
        first = rank * len(sets) // ranks
        last = max(first + 1, (rank + 1) * len(sets) // ranks)
        found.append(set().union(*sets[first:last]))
    return found


@contextlib.contextmanager
def bound(cpus: set[int] | None) -> Iterator[None]:
    """Let processes that are started meanwhile run on these processors only; None: on any."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""What the kernel tells of a process of a job, read from outside."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        pid: Its number.
        parent: That of its parent.
        state: Letter of its main thread in /proc: R runs, S sleeps, D waits for a device, T is
            stopped, Z is dead.
        started: When it began, in ticks since boot: tells it from a later process of that number.
        cpu_s: Seconds of processor time that it has used, all threads.
        ready_s: Seconds that its main thread was ready to run and had no core.
        faults: Pages that had to come from a disk.
        rss_bytes: Memory in use.
        swap_bytes: Memory of it that lies in swap.
        cores: Number of cores that it may use.
    """

    pid: int
    parent: int
    state: str
    started: int
    cpu_s: float
    ready_s: float
    faults: int
    rss_bytes: int
    swap_bytes: int
    cores: int


def read(pid: int) -> Process | None:
    """Return what is known of a process, or None if there is none."""
    at = Path(f"/proc/{pid}")
    try:
        fields = (at / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    lines: dict[str, str] = {}
    ready_s = 0.0
    with contextlib.suppress(OSError):
        pairs = (line.partition(":") for line in (at / "status").read_text().splitlines())
        lines = {name: value.strip() for name, _, value in pairs}
    with contextlib.suppress(OSError, IndexError, ValueError):  # kernels without statistics
        ready_s = int((at / "schedstat").read_text().split()[1]) * 1e-9
    swap = lines.get("VmSwap", "0 kB").split()[0]
    return Process(
        pid,
        parent=int(fields[1]),
        state=fields[0],
        started=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        ready_s=ready_s,
        faults=int(fields[9]),
        rss_bytes=int(fields[21]) * _PAGE,
        swap_bytes=int(swap) << 10,
        cores=_cores(lines.get("Cpus_allowed_list", "0")),
    )


def rss_bytes(pid: int) -> int:
    """Return the memory in use by a process; 0 if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def command_of(pid: int) -> str:
    """Return the command line of a process, or an empty text."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()
    return ""


def _cores(ranges: str) -> int:
    """Count the cores in a list such as ``0-3,8``."""
    ends = [part.split("-") for part in ranges.split(",") if part]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

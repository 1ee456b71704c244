"""A status as text: the headline, then a line for each rank."""

from __future__ import annotations

from pycoll.observe.causes import Finding, find_causes, headline
from pycoll.observe.status import ANYONE, RankStatus, Status

HEAD = (
    "rank",
    "pid",
    "state",
    "for",
    "waits for",
    "waits",
    "skew",
    "calls",
    "calls/s",
    "queue",
    "core",
    "heap",
    "newest call",
)
RIGHT = (0, 1, 3, 5, 6, 7, 8, 9, 10, 11)
_FEW = 32  # ranks that are all shown


def ordered(status: Status, findings: list[Finding]) -> list[RankStatus]:
    """Return the ranks: those that are to blame first, then those that have waited longest."""
    blamed = {rank: i for i, f in reversed(list(enumerate(findings))) for rank in f.ranks}

    def key(rank: RankStatus) -> tuple[int, float, int]:
        waited = rank.waits.seconds if rank.waits else 0.0
        return blamed.get(rank.rank, len(findings)), -waited, rank.rank

    return sorted(status.ranks, key=key)


def cells(rank: RankStatus) -> list[str]:
    """Return the line of a rank in a table whose head is `HEAD`."""
    wait = rank.waits
    peer = "" if wait is None else "any" if wait.peer == ANYONE else f"-> {wait.peer}"
    if wait is not None and rank.step is not None and rank.step > 1 and rank.step < 0xFFFE:
        peer += f" step {rank.step - 1}"
    return [
        str(rank.rank),
        str(rank.pid),
        rank.state,
        f"{wait.seconds:.1f} s" if wait else "",
        peer,
        f"{rank.waiting:.0%}",
        _time(rank.skew_s),
        f"{rank.calls:,}",
        f"{rank.calls_per_s:,.0f}",
        f"{rank.queued:,}" if rank.queued else "",
        f"{rank.busy:.0%}",
        size(rank.heap_bytes),
        rank.where or "(none)",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else duration(seconds)


def duration(seconds: float) -> str:
    """Write a time in three digits."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length:  # less would be 1e+03 of the next unit
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def size(nbytes: float) -> str:
    """Write a number of bytes with three digits."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def lines(status: Status, most: int = _FEW) -> tuple[list[str], list[list[str]], list[str]]:
    """Return what stands above the table of ranks, its lines, and what stands below."""
    findings = find_causes(status)
    above = [headline(status, findings)]
    above += [f"  also: {finding.text}" for finding in findings[1:]]
    above += [f"  to do: {f.advice}" for f in findings[:1] if f.advice]
    ranks = ordered(status, findings)
    below = [f"and {len(ranks) - most} more ranks"] if len(ranks) > most else []
    for i, group in enumerate(status.communicators[1:], 1):
        below.append(f"communicator {i}: {group['world_size']} ranks, {group['calls']:,} calls")
    for kind, (calls, nbytes) in sorted(status.traffic.items(), key=lambda entry: -entry[1][1]):
        below.append(f"{kind}: {calls:,.0f} calls/s, {nbytes / 1e9:.3g} GB/s a rank")
    return above, [cells(rank) for rank in ranks[:most]], below

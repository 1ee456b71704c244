"""An analysis as tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from pycoll.observe.page import duration, size
from pycoll.observe.report.advice import advise, headline
from pycoll.observe.report.analysis import Analysis

Table = tuple[Sequence[str], list[list[str]]]


def above(seen: Analysis) -> list[str]:
    """Return the lines above the tables: what stands out, and what the trace is."""
    findings = advise(seen)
    lines = [headline(seen, findings)]
    lines += [f"  to do: {f.advice}" for f in findings[:1] if f.advice]
    for finding in findings[1:]:
        lines += [f"also: {finding.text}", f"  to do: {finding.advice}"]
    return lines + facts(seen)


def facts(seen: Analysis) -> list[str]:
    """Say what the trace is, and how exact."""
    trace = seen.trace
    calls = sum(row.calls for row in seen.ranks)
    lines = [
        f"{len(seen.ranks)} ranks, {calls:,} calls in {duration(seen.seconds)}; "
        f"clock: {trace.clock}, error below {trace.clock_error_ns / 1e3:.3g} us"
    ]
    if trace.device_error_ns:
        lines.append(
            "times on devices are those of CUDA's events, put on the clocks of their hosts, error "
            f"below {trace.device_error_ns / 1e3:.3g} us"
        )
    if seen.lost:
        lines.append(f"{seen.lost:,} calls are missing: the disk was too slow, or took no more")
    return lines


def tables(seen: Analysis, most: int = 12) -> dict[str, Table]:
    """Return tables of ranks, collectives and call sites by their titles."""
    steps = {"Steps": _steps(seen)} if any(row.steps > 1 for row in seen.ranks) else {}
    timed = any(stream.device for stream in seen.trace.streams)
    devices = {"On devices": _devices(seen, most)} if timed else {}
    return {
        "Ranks": _ranks(seen),
        **steps,
        "Collectives": _collectives(seen, most),
        **devices,
        "Call sites": _sites(seen, most),
    }


def _ranks(seen: Analysis) -> Table:
    head = "rank", "calls", "bytes", "in calls", "waited", "last to enter", "cost others", "memory"
    rows = [
        [
            str(r.rank),
            f"{r.calls:,}",
            size(r.nbytes),
            f"{r.share:.1%}",
            duration(r.waited_s),
            f"{r.last:,}",
            duration(r.cost_s),
            size(r.peak_bytes),
        ]
        for r in seen.ranks
    ]
    return head, rows


def _steps(seen: Analysis) -> Table:
    rows = [
        [
            str(r.rank),
            f"{r.steps:,}",
            duration(r.step_s),
            f"{r.step_share:.1%}",
            f"{r.samples:.4g}",
            "" if math.isnan(r.overlap) else f"{r.overlap:.0%}",
        ]
        for r in seen.ranks
        if r.steps > 1
    ]
    return ("rank", "steps", "median", "in calls", "samples", "overlap"), rows


def _collectives(seen: Analysis, most: int) -> Table:
    head = (
        "collective",
        "ranks",
        "bytes",
        "algorithm",
        "calls",
        "median",
        "waited",
        "tuned",
        "busbw",
        "total",
    )
    rows = [
        [
            k.name,
            str(k.ranks),
            size(k.nbytes),
            k.algorithm,
            f"{k.calls:,}",
            duration(k.median_s),
            duration(k.waited_s),
            "" if math.isnan(k.tuned_s) else duration(k.tuned_s),
            "" if math.isnan(k.busbw) else f"{k.busbw:.3g} GB/s",
            duration(k.total_s),
        ]
        for k in seen.kinds[:most]
    ]
    return head, rows


def _devices(seen: Analysis, most: int) -> Table:
    """Count what events have timed on devices, by the name of the call."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for stream in seen.trace.streams:
        for name, begin, total, nbytes, _, launched, _ in stream.device:
            rows.setdefault(name, []).append((total, begin - launched, nbytes))
    found = []
    for name, calls in sorted(rows.items(), key=lambda row: -sum(call[0] for call in row[1])):
        took, behind, _ = (median(column) * 1e-9 for column in zip(*calls, strict=True))
        total = sum(call[0] for call in calls) * 1e-9
        row = [
            size(calls[0][2]),
            f"{len(calls):,}",
            duration(took),
            duration(behind),
            duration(total),
        ]
        found.append([name, *row])
    return ("on a device", "bytes", "calls", "median", "after launch", "total"), found[:most]


def _sites(seen: Analysis, most: int) -> Table:
    rows = [
        [s.site, f"{s.calls:,}", duration(s.total_s), duration(s.waited_s), f"{s.small:,}"]
        for s in seen.sites[:most]
    ]
    return ("call site", "calls", "total", "waited", "small"), rows


def changes(before: Analysis, after: Analysis) -> Table:
    """Compare two traces: of ranks as a whole, and of each collective that both have."""
    rows = [_change("time", before.seconds, after.seconds)]
    for name, what in (("in calls", "inside_s"), ("waited", "waited_s"), ("cost others", "cost_s")):
        rows.append(
            _change(name, *(sum(getattr(r, what) for r in a.ranks) for a in (before, after)))
        )
    known = {(k.name, k.ranks, k.nbytes): k for k in before.kinds}
    for kind in after.kinds:
        old = known.get((kind.name, kind.ranks, kind.nbytes))
        if old is not None:
            name = f"{kind.name} {size(kind.nbytes)}, median"
            rows.append(_change(name, old.median_s, kind.median_s))
    return ("", "before", "after", "change"), rows


def _change(name: str, old: float, new: float) -> list[str]:
    change = f"{new / old - 1:+.0%}" if old > 0 else ""
    return [name, duration(old), duration(new), change]

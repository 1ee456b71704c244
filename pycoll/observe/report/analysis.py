"""Counting a trace: by rank, by collective, by call site."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.observe.links import LinkState, states
from pycoll.observe.shares import SMALL
from pycoll.observe.trace.merged import Group, Merged
from pycoll.runtime.calls.descriptors import Call
from pycoll.schedule.cost.cost import busbw_factor
from pycoll.types import type_bytes


@dataclass
class RankRow:
    """What one rank did.

    Attributes:
        rank: Its number.
        calls, nbytes: How many calls, and the bytes of their arrays.
        inside_s, waited_s: Time in calls; of that, for peers.
        share: Of the whole time, in calls.
        last: How often it was the last to enter, by more than `LATE_NS`.
        cost_s: Time that the other ranks lost to that, all of them together.
        peak_bytes, symmetric_bytes: Most memory of its process, and of that symmetric.
        growth: Bytes per second by which the memory of its process grew over the whole time.
        swap_bytes: Most memory of its process in swap.
        faults_per_s: Pages that had to come from a disk.
        ready: Share of the time in which it was ready to run, and had no core,
        cores: of so many.
        steps, step_s: How many steps the trace tells of, and the median of their lengths.
        step_share: Share of the steps' time in calls.
        samples: It had in a step, on average; nan if the trace does not say.
        overlap: Share of the time of calls that was hidden behind work; nan likewise.
    """

    rank: int
    calls: int = 0
    nbytes: int = 0
    inside_s: float = 0.0
    waited_s: float = 0.0
    share: float = 0.0
    last: int = 0
    cost_s: float = 0.0
    peak_bytes: int = 0
    symmetric_bytes: int = 0
    growth: float = 0.0
    swap_bytes: int = 0
    faults_per_s: float = 0.0
    ready: float = 0.0
    cores: int = 0
    steps: int = 0
    step_s: float = math.nan
    step_share: float = math.nan
    samples: float = math.nan
    overlap: float = math.nan


@dataclass
class KindRow:
    """The calls of one collective, of one size class and communicator.

    Attributes:
        name: The collective.
        ranks: World size of the communicator.
        nbytes: Bytes of each call, the most frequent size of the class.
        algorithm: The most frequent one.
        calls: How many.
        median_s, waited_s: Of a call: median time, and mean wait, over ranks.
        tuned_s: Time that `pycoll tune` has measured for the algorithm at the nearest size; nan if
            there is none within a factor of two.
        moving_s: Median of the time from the last to enter until the last to leave.
        busbw: Bus bandwidth over that time, in GB/s; nan where there is none.
        total_s: Time in them, mean over ranks.
    """

    name: str
    ranks: int
    nbytes: int
    algorithm: str
    calls: int
    median_s: float
    waited_s: float
    tuned_s: float
    moving_s: float
    busbw: float
    total_s: float


@dataclass
class SiteRow:
    """A line of the program: its calls, and their time, mean over ranks."""

    site: str
    calls: int
    total_s: float
    waited_s: float
    small: int


@dataclass
class Analysis:
    """All that is counted.

    Attributes:
        trace: What it was counted from.
        seconds: From the first call to the end of the last.
        ranks, kinds, sites: The rows; kinds and sites by time, the most first.
        links: The connections over TCP, over the whole time.
        failed: Calls in which a rank raised.
        lost: Calls that the trace does not have.
    """

    trace: Merged
    seconds: float
    ranks: list[RankRow]
    kinds: list[KindRow]
    sites: list[SiteRow]
    links: list[LinkState]
    failed: int
    lost: int


LATE_NS = 20_000
_SHORTEST_S = 1.0  # in which pages from a disk are counted


def analyse(trace: Merged) -> Analysis:
    """Count a trace."""
    seconds = max((trace.end_ns - trace.begin_ns) * 1e-9, 1e-9)
    ranks = {rank: RankRow(rank) for rank in trace.ranks}
    kinds: dict[tuple, list[tuple[Group, np.ndarray]]] = {}
    sites: dict[str, SiteRow] = {}
    failed = 0
    for group in trace.groups:
        if not group.iteration.size:
            continue
        _count_ranks(group, ranks)
        failed += int(group.failed.sum())
        for key, at in _classes(group):
            kinds.setdefault(key, []).append((group, at))
        _count_sites(group, sites)
    for row in ranks.values():
        row.share = row.inside_s / seconds
        _memory(trace, row)
        _steps(trace, row)
    rows = [_kind(*key, parts) for key, parts in kinds.items()]
    return Analysis(
        trace,
        seconds,
        [ranks[rank] for rank in sorted(ranks)],
        sorted(rows, key=lambda row: -row.total_s),
        sorted(sites.values(), key=lambda row: -row.total_s),
        _links(trace),
        failed,
        sum(stream.lost for stream in trace.streams),
    )


def _size(descriptor: int, count: int) -> tuple[Call, int]:
    what = Call.unpack(descriptor, count)
    return what, count * type_bytes(what.dtype)


def _count_ranks(group: Group, ranks: dict[int, RankRow]) -> None:
    sizes = np.zeros(group.iteration.size, np.int64)
    for descriptor, count in {*zip(group.descriptor.tolist(), group.count.tolist(), strict=True)}:
        _, nbytes = _size(descriptor, count)
        sizes[(group.descriptor == descriptor) & (group.count == count)] = nbytes
    late, last = group.late_ns, group.last
    counts = late >= LATE_NS
    for place, rank in enumerate(group.members):
        row, made = ranks.get(rank), ~np.isnan(group.enter_ns[place])
        if row is None:
            continue
        row.calls += int(made.sum())
        row.nbytes += int(sizes[made].sum())
        row.inside_s += float(np.nansum(group.leave_ns[place] - group.enter_ns[place])) * 1e-9
        row.waited_s += float(np.nansum(group.waited_ns[place])) * 1e-9
        mine = counts & (last == place)
        row.last += int(mine.sum())
        waiting = np.nansum(np.delete(group.waited_ns, place, axis=0), axis=0)
        others = len(group.members) - 1
        row.cost_s += float(np.minimum(waiting, late * others)[mine].sum()) * 1e-9


def _classes(group: Group) -> list[tuple[tuple, np.ndarray]]:
    found: dict[tuple, list[np.ndarray]] = {}
    pairs = np.stack([group.descriptor, group.count])
    for descriptor, count in np.unique(pairs, axis=1).T.tolist():
        what, nbytes = _size(descriptor, count)
        key = what.kind, len(group.members), nbytes.bit_length()
        at = np.flatnonzero((group.descriptor == descriptor) & (group.count == count))
        found.setdefault(key, []).append(at)
    return [(key, np.concatenate(parts)) for key, parts in found.items()]


def _kind(name: str, ranks: int, _: int, parts: list[tuple[Group, np.ndarray]]) -> KindRow:
    total, waited, moving, calls = [], [], [], 0
    sizes: dict[tuple[int, str, bool], int] = {}
    for group, at in parts:
        spans = group.leave_ns[:, at] - group.enter_ns[:, at]
        total.append(np.nanmean(spans, axis=0))
        waited.append(np.nanmean(group.waited_ns[:, at], axis=0))
        moving.append(np.nanmax(group.leave_ns[:, at], 0) - np.nanmax(group.enter_ns[:, at], 0))
        calls += at.size
        for k in at.tolist():
            what, nbytes = _size(int(group.descriptor[k]), int(group.count[k]))
            key = nbytes, what.algorithm, what.memory.startswith("symmetric")
            sizes[key] = sizes.get(key, 0) + 1
    (nbytes, algorithm, symmetric), _ = max(sizes.items(), key=lambda entry: entry[1])
    all_total, all_waited, all_moving = map(np.concatenate, (total, waited, moving))
    moving_s = max(float(np.median(all_moving)), 1.0) * 1e-9
    try:
        busbw = nbytes / moving_s * busbw_factor(name, ranks) * 1e-9
    except ScheduleError:  # it moves nothing
        busbw = float("nan")
    return KindRow(
        name,
        ranks,
        nbytes,
        algorithm.partition("#")[0],
        calls,
        float(np.median(all_total)) * 1e-9,
        float(np.mean(all_waited)) * 1e-9,
        _tuned(parts[0][0], name, nbytes, symmetric, algorithm.partition("#")[0]),
        moving_s,
        busbw,
        float(np.sum(all_total)) * 1e-9,
    )


def _tuned(group: Group, name: str, nbytes: int, symmetric: bool, algorithm: str) -> float:
    rows = next((s.head["tuned"] for s in group.streams if s and s.head["tuned"]), [])
    near = [
        (abs(math.log(max(size, 1) / max(nbytes, 1))), seconds)
        for collective, size, direct, by, seconds in rows
        if (collective, direct, by) == (name, symmetric, algorithm)
    ]
    far, seconds = min(near, default=(math.inf, math.nan))
    return seconds if far <= math.log(2) else math.nan


def _count_sites(group: Group, sites: dict[str, SiteRow]) -> None:
    spans = np.nanmean(group.leave_ns - group.enter_ns, axis=0) * 1e-9
    waits = np.nanmean(group.waited_ns, axis=0) * 1e-9
    small: dict[tuple[int, int], bool] = {}
    for k, text in enumerate(group.site):
        row = sites.setdefault(text or "(unknown)", SiteRow(text or "(unknown)", 0, 0.0, 0.0, 0))
        key = int(group.descriptor[k]), int(group.count[k])
        if key not in small:
            what, nbytes = _size(*key)
            small[key] = nbytes <= SMALL and what.kind != "barrier"
        row.calls += 1
        row.total_s += float(spans[k])
        row.waited_s += float(waits[k])
        row.small += small[key]


def _links(trace: Merged) -> list[LinkState]:
    """Compare the first and the last look at connections of the communicator of all ranks."""
    first, last = {}, {}
    for stream in trace.streams:
        if stream.links and stream.head["world_size"] == len(trace.ranks):
            seen = [look for look in stream.links if look]
            if seen:
                first[stream.rank], last[stream.rank] = seen[0], seen[-1]
    return states(first, last)


def _steps(trace: Merged, row: RankRow) -> None:
    """Count what lies between two ends of steps."""
    own = [s for s in trace.streams if s.rank == row.rank]
    steps = sorted((step for s in own for step in s.steps), key=lambda step: step[0])
    ends = np.array(steps, np.float64).reshape(-1, 3)
    row.steps = len(ends)
    if not row.steps:
        return
    row.samples = float(np.mean(ends[:, 1]))
    if row.steps < 2:
        return
    first, last = ends[0, 0], ends[-1, 0]
    inside = 0.0
    for stream in own:
        enter = stream.calls["enter_ns"].astype(np.int64)
        there = (enter >= first) & (enter < last)
        inside += float(stream.calls["total_ns"][there].sum(dtype=np.float64))
        inside += sum(total for _, begin, total, *_ in stream.messages if first <= begin < last)
    if inside:
        row.overlap = float(np.clip(1 - ends[1:, 2].sum() * 1e9 / inside, 0, 1))
    row.step_s = float(np.median(np.diff(ends[:, 0]))) * 1e-9
    row.step_share = inside / max(float(last - first), 1.0)


def _memory(trace: Merged, row: RankRow) -> None:
    samples = sorted(m for s in trace.streams if s.rank == row.rank for m in s.memory)
    if samples:
        when, process, symmetric, swap, faults, ready, cores = np.array(samples, np.float64).T
        row.ready = float(np.ptp(ready) / max(np.ptp(when) * 1e-9, _SHORTEST_S))
        row.cores = int(cores.max())
        row.swap_bytes = int(swap.max())
        row.faults_per_s = float(np.ptp(faults) / max(np.ptp(when) * 1e-9, _SHORTEST_S))
        row.peak_bytes, row.symmetric_bytes = int(process.max()), int(symmetric.max())
        if len(samples) >= 4 and np.ptp(when) > 0:  # of the later half: a program begins by growing
            half = len(samples) // 2
            row.growth = float(np.polyfit(when[half:] * 1e-9, process[half:], 1)[0])

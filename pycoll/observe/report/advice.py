"""Judging a trace: what costs most, which rank it is, and what to do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pycoll.observe.causes import STARVED, Finding
from pycoll.observe.links import DEAD_ADVICE, SLOW_ADVICE, dead, slow
from pycoll.observe.page import duration, size
from pycoll.observe.report.analysis import Analysis, RankRow
from pycoll.observe.shares import SMALL
from pycoll.observe.trace.merged import Group, unwrapped
from pycoll.runtime.calls.descriptors import Call

_WORTH = 0.05  # of the time, from where on something is worth a word
_SHARE = 0.6  # of what waits for the last to enter cost, from where on one rank is a straggler
_GROWTH, _GROWN = 0.02, 16 << 20  # of its memory per second, and bytes in all, that are growth
_SAMPLES = 1.15  # bytes, or samples, of a rank over the mean
_FAULTS = 100  # pages from a disk per second,
_SWAPPED = 16 << 20  # and bytes in swap, from where on a rank counts as swapped out


def advise(seen: Analysis) -> list[Finding]:
    """Return what is worth knowing, what ended the job first, then the most expensive."""
    links = _links(seen)
    known = [(finding.cause, finding.ranks) for finding in links]
    held = [finding for finding in _held(seen) if (finding.cause, finding.ranks) not in known]
    found = [*links, *_stragglers(seen), *_growth(seen), *_small(seen)]
    found += [*_memory(seen), *held]
    found.sort(key=lambda finding: -finding.waited_s)
    causes = [finding.cause for finding in found]
    at = causes.index("small calls") if "small calls" in causes else len(found)
    found[at:at] = _cores(seen)  # which makes calls slow
    return _with_failure(seen, found, held)


def headline(seen: Analysis, findings: list[Finding]) -> str:
    """Say in one line what the trace shows."""
    if findings:
        return findings[0].text
    share = np.mean([row.share for row in seen.ranks])
    return f"nothing stands out: the ranks spend {share:.0%} of {duration(seen.seconds)} in calls"


def _with_failure(seen: Analysis, found: list[Finding], held: list[Finding]) -> list[Finding]:
    """Put in front why a call failed, as far as that is known, and that it did."""
    bad = [(group, int(k)) for group in seen.trace.groups for k in np.flatnonzero(group.failed)[:1]]
    if not bad:
        return found
    group, k = bad[0]
    if odd := _odd(group, k):
        return [odd, *found]
    missing = [group.members[p] for p in np.flatnonzero(np.isnan(group.enter_ns[:, k]))]
    who = f"; rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else ""
    who += " never entered it, or died before its end" if missing else ""
    text = f"a call failed at {group.site[k] or 'an unknown place'} (call {k + 1}){who}"
    failed = Finding("failed", missing, text, "PYCOLL_DUMP=DIR tells how it came to that")
    took_s = float(np.nanmax(group.leave_ns[:, k] - group.enter_ns[:, k])) * 1e-9
    why = [
        finding
        for finding in found
        if finding.cause == "dead link" or (finding in held and finding.waited_s > took_s / 4)
    ]
    why.sort(key=lambda finding: finding.cause == "failed")  # which tells no more than the error
    return [*why, failed, *(finding for finding in found if finding not in why)]


def _odd(group: Group, k: int) -> Finding | None:
    """Name the ranks that made another call than the others, if the k-th failed of that."""
    made: dict[tuple[int, int], list[int]] = {}
    words: dict[tuple[int, int], str] = {}
    for place, stream in enumerate(group.streams):
        if stream is None or np.isnan(group.enter_ns[place, k]):
            continue
        call = stream.calls[np.searchsorted(unwrapped(stream), group.iteration[k])]
        key = int(call["descriptor"]), int(call["count"])
        made.setdefault(key, []).append(group.members[place])
        site = stream.sites.get(int(call["site"]) & 0x7FFF, "")
        words.setdefault(key, f"{Call.unpack(*key)} at {site or 'an unknown place'}")
    if len(made) < 2:
        return None
    usual, *others = sorted(made, key=lambda key: -len(made[key]))
    ranks = sorted(rank for key in others for rank in made[key])
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = f"{noun} {', '.join(map(str, ranks))} left the common path: {words[others[0]]}, where "
    text += f"the others called {words[usual]}"
    return Finding("mismatch", ranks, text, "all ranks must make the same calls", 1e9)


def _held(seen: Analysis) -> list[Finding]:
    """Return what ranks that waited long have seen: each cause once, at its longest."""
    worst: dict[tuple, Finding] = {}
    for stream in seen.trace.streams:
        for note in stream.held:
            finding = Finding(**note)
            others = max(1, len(seen.ranks) - len(finding.ranks))
            finding = replace(finding, waited_s=finding.waited_s * others)
            key = finding.cause, tuple(finding.ranks)
            if key not in worst or worst[key].waited_s < finding.waited_s:
                worst[key] = finding
    return list(worst.values())


def _cores(seen: Analysis) -> list[Finding]:
    """Say so where ranks had fewer cores than there are ranks, and felt it."""
    starved = [row for row in seen.ranks if row.ready >= STARVED]
    if not starved:
        return []
    worst = max(starved, key=lambda row: row.ready)
    cost = sum(row.ready for row in starved) * seen.seconds
    text = f"rank {worst.rank} {_no_core(seen, worst)}"
    ranks = [row.rank for row in starved]
    return [Finding("cores", ranks, text, "use fewer ranks, or more cores", cost)]


def _no_core(seen: Analysis, row: RankRow) -> str:
    text = f"is ready to run, but has no core for {row.ready:.0%} of the time: "
    if len(seen.ranks) > row.cores:
        return text + f"{len(seen.ranks)} ranks share {row.cores} cores"
    return text + f"other programs use the {row.cores} cores of its host"


def _links(seen: Analysis) -> list[Finding]:
    """Name connections that held the ranks up."""
    waited = sum(row.waited_s for row in seen.ranks)
    gone = [
        Finding("dead link", [s.rank, s.peer], s.words(), DEAD_ADVICE, waited + s.silent_s)
        for s in dead(seen.links)
    ]
    if waited < _WORTH * seen.seconds * len(seen.ranks):
        return gone
    return gone + [
        Finding(
            "slow link",
            [s.rank, s.peer],
            f"{s.words()}; ranks waited {duration(waited)}",
            SLOW_ADVICE,
            waited,
        )
        for s in slow(seen.links)
    ]


def _stragglers(seen: Analysis) -> list[Finding]:
    waited = sum(row.waited_s for row in seen.ranks)
    time = seen.seconds * len(seen.ranks)
    calls = max((row.calls for row in seen.ranks), default=0)
    worst = max(seen.ranks, key=lambda row: row.cost_s, default=None)
    if worst is None or worst.cost_s < _WORTH * time or not calls:
        return []
    often, cost = worst.last / calls, worst.cost_s / time
    why, advice = _why_late(seen, worst)
    text = f"rank {worst.rank} enters {often:.0%} of the calls last{why}; the others lost "
    text += f"{duration(worst.cost_s)} to that, {cost:.0%} of the time of all ranks"
    share = worst.cost_s / waited if waited else 0.0
    return [Finding("straggler", [worst.rank], text, advice, min(share, 1.0) * waited)]


def _why_late(seen: Analysis, worst: RankRow) -> tuple[str, str]:
    """Return why a rank comes last, as far as the trace tells, and what to do."""
    mean = np.mean([row.nbytes for row in seen.ranks])
    known = [row.samples for row in seen.ranks if not math.isnan(row.samples)]
    samples = float(np.mean(known)) if known else math.nan
    if worst.faults_per_s > _FAULTS or worst.swap_bytes > _SWAPPED:
        why = f", for it is swapped out ({size(worst.swap_bytes)} in swap, "
        why += f"{worst.faults_per_s:,.0f} pages/s from a disk)"
        return why, "give the job more memory, or use less"
    if worst.samples > _SAMPLES * samples:
        why = f", for it has {worst.samples:.4g} samples a step where the mean is {samples:.4g}"
        return why, "divide the samples evenly"
    if worst.ready > STARVED:
        return f", for it {_no_core(seen, worst)}", "use fewer ranks, or more cores"
    if _in_turns(seen):
        return ", and others do so in turn", "look for uneven work, or too few cores"
    if worst.nbytes > _SAMPLES * mean:
        much = f"{worst.nbytes / mean:.2f} times the mean bytes"
        return f", for it moves {much}", "divide the work evenly"
    why = f", for it has {duration(_between(seen, worst))} more to do between calls than the mean"
    return why, "give it fewer samples, or look at its processor, its disk, and its memory"


def _in_turns(seen: Analysis) -> bool:
    """Whether no one rank is mostly the last."""
    costs = [row.cost_s for row in seen.ranks]
    return max(costs) < _SHARE * sum(costs)


def _between(seen: Analysis, row: RankRow) -> float:
    own = seen.seconds - row.inside_s
    return own - float(np.mean([seen.seconds - other.inside_s for other in seen.ranks]))


def _growth(seen: Analysis) -> list[Finding]:
    rows = [
        row
        for row in seen.ranks
        if row.growth > max(_GROWTH * row.peak_bytes, 1 << 20)
        and row.growth * seen.seconds > _GROWN
    ]
    if not rows:
        return []
    worst = max(rows, key=lambda row: row.growth)
    text = f"the memory of rank {worst.rank} grows by {size(worst.growth)}/s, to "
    text += f"{size(worst.peak_bytes)} at the end"
    advice = "look for lists of arrays or of Work that are kept; tracemalloc tells which line"
    return [Finding("memory", [row.rank for row in rows], text, advice, seen.seconds)]


def _small(seen: Analysis) -> list[Finding]:
    small = [row for row in seen.sites if row.small > 0.5 * row.calls and row.calls >= 16]
    waits = _in_turns(seen) and max(row.ready for row in seen.ranks) < STARVED  # are the calls' own
    cost = sum(row.total_s - (0 if waits else row.waited_s) for row in small) * len(seen.ranks)
    if not small or sum(row.total_s for row in small) < _WORTH * seen.seconds:
        return []
    worst = max(small, key=lambda row: row.total_s)
    text = f"all ranks make {worst.small:,} calls of at most {SMALL >> 10} KiB at {worst.site}: "
    text += f"{duration(worst.total_s)}, {worst.total_s / seen.seconds:.0%} of the time"
    ranks = [row.rank for row in seen.ranks]
    advice = "put what they carry into one array (larger buckets), or make them async_op"
    return [Finding("small calls", ranks, text, advice, max(cost, 0.0))]


def _memory(seen: Analysis) -> list[Finding]:
    rows = [row for row in seen.ranks if row.peak_bytes]
    if len(rows) < 2:
        return []
    worst = max(rows, key=lambda row: row.peak_bytes)
    rest = float(np.median([row.peak_bytes for row in rows if row is not worst]))
    if worst.peak_bytes < 1.5 * rest or worst.peak_bytes - rest < 64 << 20:
        return []
    text = f"rank {worst.rank} uses {size(worst.peak_bytes)} where the others use {size(rest)}"
    return [Finding("uneven memory", [worst.rank], text, "shard what only it holds (ZeRO)")]

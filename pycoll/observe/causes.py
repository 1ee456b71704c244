"""What is wrong with a job: which rank holds the others up, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pycoll.observe.links import DEAD_ADVICE, SLOW_ADVICE, dead, slow
from pycoll.observe.shares import SMALL
from pycoll.observe.status import ANYONE, OVER, RankStatus, Status

_LONG_S = 0.5  # a wait that is worth a word
_SWAPPED = 16 << 20  # bytes in swap from where on a rank counts as swapped out
_FAULTS = 100  # pages from a disk per second, likewise
_UNEVEN = 0.2  # of the time of the others that waits for one rank cost, to be worth a word
_FAIR = 0.5  # of what the others wait: a rank that waits less has more to do than they
_MOVES = 10_000  # bytes/s from where on a connection is no deadlock
STARVED = 0.25  # of the time without a core, from where on cores are too few
_LEAK, _LEAK_SHARE = 4 << 20, 0.02  # bytes per second, and share of its memory, that is growth
_MANY = 200  # calls per second from where on they are many


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        cause: A word for it, such as ``stopped``.
        ranks: Those that it is about.
        text: What it is, with ranks, processes and places.
        advice: What to do.
        waited_s: How long others have waited because of it.
    """

    cause: str
    ranks: list[int]
    text: str
    advice: str = ""
    waited_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def headline(status: Status, findings: list[Finding]) -> str:
    """Say in one line how the job is: its first finding, or that there is none."""
    if findings:
        return findings[0].text
    n = len([rank for rank in status.ranks if rank.state not in OVER])
    if n == 0:
        return "no rank runs any more"
    rate = max(rank.calls_per_s for rank in status.ranks)
    who = f"all {n} ranks" if n == len(status.ranks) else f"the {n} ranks that are left"
    return f"{who} are well: {rate:,.0f} calls/s, nobody waits longer than {_LONG_S} s"


def find_causes(status: Status) -> list[Finding]:
    """Return what is wrong, the culprit of the longest wait first."""
    found = [*_failed(status), *_deadlocks(status), *_held_up(status)]
    found.sort(key=lambda finding: -finding.waited_s)
    links = _links(status)
    if links and links[0].cause == "dead link":  # what waits for it is not to blame
        found = [f for f in found if f.cause not in ("deadlock", "slow")]
    found = links + found
    if not found:
        found = _uneven(status) or _growing(status) or _small(status)
    return found + _starved(status)


def _links(status: Status) -> list[Finding]:
    """Find connections that are dead, or that hold ranks up."""
    found = []
    for link in dead(status.links):
        waits = [w for r in status.ranks if (w := r.waits)]
        waited = max((w.seconds for w in waits), default=0.0)
        text = link.words()
        if waits:
            text += f"; ranks have waited {waited:.3g} s"
        both = [link.rank, link.peer]
        found.append(Finding("dead link", both, text, DEAD_ADVICE, max(waited, link.silent_s)))
    waiting = max((rank.waiting for rank in status.ranks), default=0.0)
    if found or waiting < _UNEVEN:
        return found
    for link in slow(status.links):
        text = f"{link.words()}; ranks wait {waiting:.0%} of the time"
        both = [link.rank, link.peer]
        found.append(Finding("slow link", both, text, SLOW_ADVICE))
    return found


def _uneven(status: Status) -> list[Finding]:
    """Find the rank that others mostly wait for, though calls go on."""
    there = [rank for rank in status.ranks if rank.state not in (*OVER, "absent", "elsewhere")]
    worst = max(there, key=lambda rank: rank.blamed, default=None)
    if worst is None or len(there) < 2 or worst.blamed < _UNEVEN:
        return []
    mean = sum(rank.waiting for rank in there if rank is not worst) / (len(there) - 1)
    if worst.waiting > _FAIR * mean:
        return []  # they take turns
    share = worst.blamed / sum(rank.blamed for rank in there)
    cause, what, advice = _why(worst)
    if cause not in ("stopped", "swapped", "starved", "blocked"):
        cause, what = "uneven", f"has more to do between calls than the others (process {worst.pid}"
        what += f": {worst.busy:.0%} of a core)"
        advice = "divide samples, tokens or layers evenly; a trace tells how much each rank has"
    text = f"rank {worst.rank} {what}; the others wait {mean:.0%} of the time, {share:.0%} of that "
    text += f"for it, and it waits {worst.waiting:.0%}"
    return [Finding(cause, [worst.rank], text, advice)]


def _growing(status: Status) -> list[Finding]:
    """Find ranks whose memory grows while calls go on."""
    grow = [
        rank
        for rank in status.ranks
        if rank.growth > max(_LEAK, _LEAK_SHARE * rank.rss_bytes) and rank.calls_per_s > 0
    ]
    if not grow:
        return []
    worst = max(grow, key=lambda rank: rank.growth)
    rate, now = worst.growth / (1 << 20), worst.rss_bytes / (1 << 20)
    text = f"the memory of rank {worst.rank} grows by {rate:,.0f} MiB/s, and is {now:,.0f} MiB "
    text += f"(process {worst.pid})"
    advice = "look for lists of arrays or of Work that are kept; tracemalloc tells which line"
    return [Finding("memory", [rank.rank for rank in grow], text, advice)]


def _small(status: Status) -> list[Finding]:
    """Say so where all ranks spend their time in many small calls."""
    there = [rank for rank in status.ranks if rank.state not in (*OVER, "absent", "elsewhere")]
    if len(there) < 2 or min(rank.small for rank in there) < _UNEVEN:
        return []
    rate = max(rank.calls_per_s for rank in there)
    if rate < _MANY:
        return []
    one = there[0]
    share = sum(rank.small for rank in there) / len(there)
    text = f"all ranks make {rate:,.0f} calls/s of at most {SMALL >> 10} KiB, {share:.0%} of the "
    text += f"time, such as rank {one.rank} {one.where}"
    advice = "put what they carry into one array (larger buckets), or make them async_op"
    return [Finding("small calls", [rank.rank for rank in there], text, advice)]


def _failed(status: Status) -> list[Finding]:
    failure = status.failure
    if failure is None:
        return []
    if failure["kind"] == "MismatchError" and (odd := _odd(status)):
        return [odd]
    rank = status.ranks[failure["culprit"]]
    why = f": {failure['text']}" if failure["text"] else ""
    last = f"; its last call was {rank.where}" if rank.call else ""
    text = f"rank {rank.rank} has ended the communicator ({failure['kind']}){why}{last}"
    return [Finding("failed", [rank.rank], text, "the errors of the ranks tell more", 1e9)]


def _odd(status: Status) -> Finding | None:
    """Name the ranks whose newest call is not that of most others."""
    made: dict[str, list[RankStatus]] = {}
    for rank in status.ranks:
        made.setdefault(rank.call, []).append(rank)
    if len(made) < 2:
        return None
    usual, *others = sorted(made.values(), key=lambda ranks: -len(ranks))
    odd = [rank for ranks in others for rank in ranks]
    numbers = [rank.rank for rank in odd]
    text = (
        f"rank{'s' * (len(odd) > 1)} {_list(numbers)} left the common path: {odd[0].where}, where "
    )
    text += f"the others called {usual[0].where}; the communicator has ended (MismatchError)"
    return Finding("mismatch", numbers, text, "all ranks must make the same calls", 1e9)


def _waits_for(status: Status) -> dict[int, int]:
    """Map each rank that waits long to the one that it waits for."""
    return {
        rank.rank: rank.waits.peer
        for rank in status.ranks
        if rank.waits
        and rank.waits.peer != ANYONE
        and rank.waits.seconds >= _LONG_S
        and rank.state == "waits"
    }


def _deadlocks(status: Status) -> list[Finding]:
    edges, found, seen = _waits_for(status), [], set()
    for start in edges:
        path: list[int] = []
        at: int | None = start
        while at is not None and at not in path and at not in seen:
            path.append(at)
            at = edges.get(at)
        seen.update(path)
        if at in path:
            circle = path[path.index(at) :]
            if _data_moves(status, circle):
                continue
            waits = [status.ranks[rank].waits for rank in circle]
            parts = [
                f"rank {rank} waits for rank {wait.peer} {wait.what}"
                for rank, wait in zip(circle, waits, strict=True)
                if wait
            ]
            text = f"deadlock of ranks {_list(circle)}: {'; '.join(parts)}"
            waited = max(wait.seconds for wait in waits if wait)
            advice = "let one of them receive before it sends, or use other tags or another order"
            found.append(Finding("deadlock", circle, text, advice, waited))
    return found


def _data_moves(status: Status, circle: list[int]) -> bool:
    """Whether ranks that wait for each other get something all the while."""
    return any(
        link.moved > _MOVES * status.interval_s and {link.rank, link.peer} <= set(circle)
        for link in status.links
    )


def _held_up(status: Status) -> list[Finding]:
    """Find ranks that others wait for, and that wait for nobody themselves."""
    edges = _waits_for(status)
    victims: dict[int, list[int]] = {}
    for rank in edges:
        at, path = rank, [rank]
        while at in edges and edges[at] not in path:
            at = edges[at]
            path.append(at)
        if at not in edges and at >= 0:
            victims.setdefault(at, []).append(rank)
    return [_blame(status, culprit, ranks) for culprit, ranks in victims.items()]


def _blame(status: Status, culprit: int, victims: list[int]) -> Finding:
    rank = status.ranks[culprit]
    first = max((status.ranks[v] for v in victims), key=lambda r: r.waits.seconds if r.waits else 0)
    wait = first.waits
    assert wait is not None
    cause, what, advice = _why(rank)
    noun = "rank" if len(victims) == 1 else "ranks"
    have = "has" if len(victims) == 1 else "have"
    text = f"rank {culprit} {what}; {noun} {_list(victims)} {have} waited {wait.seconds:.3g} s"
    text += f" for it {wait.what}"
    return Finding(cause, [culprit], text, advice, wait.seconds)


def _why(rank: RankStatus) -> tuple[str, str, str]:
    """Return a word for what holds up a rank, a clause about it, and what to do."""
    process = f"process {rank.pid}" + (f" on {rank.host}" if rank.host else "")
    after = f" after {rank.where}" if rank.call else " before its first call"
    if rank.state == "stopped":
        advice = f"kill -CONT {rank.pid}"
        return "stopped", f"is stopped by a signal or a debugger ({process}){after}", advice
    if rank.state == "elsewhere":
        return "elsewhere", "is on another host, and has not come", "run pycoll status there"
    if rank.state == "absent":
        return "absent", "has not joined the job", "look at its output"
    if rank.state in OVER:
        how = {"gone": "is dead", "left": "has left", "closed": "has closed its communicator"}
        why = f": {rank.why}" if rank.why else ""
        return rank.state, f"{how[rank.state]} ({process}){after}{why}", "look at its output"
    if rank.swap_bytes >= _SWAPPED or rank.faults_per_s > _FAULTS:
        size = f"{rank.swap_bytes / (1 << 20):,.0f} MiB of its memory"
        rate = f"{rank.faults_per_s:,.0f} pages/s come from a disk"
        what = f"is swapped out ({process}: {size} in swap, {rate}){after}"
        return "swapped", what, "give the job more memory, or use less"
    if rank.inside:
        how = "waits for a core" if rank.ready > STARVED else "works"
        return "slow", f"{how} inside {rank.where} ({process})", "look at its processor"
    if rank.state == "waits":  # in recv from any rank
        what = f"waits for a message of any rank {rank.waits.what if rank.waits else ''}"
        return "message", what, "look for the send that is missing"
    if rank.ready > STARVED:
        share = f"{rank.ready:.0%} of the time it has no core"
        return "starved", f"waits for a core ({process}: {share}){after}", "use fewer ranks"
    words = {
        "blocked": ("blocked", "is blocked in the kernel", "look at disks and network drives"),
        "sleeps": ("sleeping", "sleeps in its own code", "py-spy dump --pid {0} tells where"),
    }
    cause, what, advice = words.get(
        rank.state, ("computing", "computes in its own code", "py-spy dump --pid {0} tells where")
    )
    share = f"{rank.busy:.0%} of a core"
    return cause, f"{what} ({process}: {share}){after}", advice.format(rank.pid)


def _starved(status: Status) -> list[Finding]:
    """Say so where ranks have fewer cores than there are ranks, and feel it."""
    there = [rank for rank in status.ranks if rank.state not in (*OVER, "absent", "elsewhere")]
    starved = [rank for rank in there if rank.ready >= STARVED]
    if not starved or not there:
        return []
    cores = max(rank.cores for rank in there)
    worst = max(starved, key=lambda rank: rank.ready)
    text = f"rank {worst.rank} is ready to run, but has no core for {worst.ready:.0%} of the time: "
    text += (
        f"{len(there)} ranks share {cores} cores"
        if len(there) > cores
        else f"other programs use the {cores} cores of this host"
    )
    ranks = [rank.rank for rank in starved]
    return [Finding("cores", ranks, text, "use fewer ranks, or more cores")]


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))

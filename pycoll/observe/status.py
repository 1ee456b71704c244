"""The status of a job: what every rank does, how fast, and whom it waits for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pycoll.observe.boards import ELSEWHERE
from pycoll.observe.links import LinkState, states
from pycoll.observe.look import ABSENT, CLOSED, LEFT, Group, Look, look
from pycoll.observe.processes import Process
from pycoll.observe.shares import Shares, watch
from pycoll.runtime.calls.descriptors import Call
from pycoll.runtime.sessions.reports import made_at
from pycoll.schedule.lowering.plan import DONE, ENTERED

_SEND = 1  # MessageWay of csrc/memory/control.h
ANYONE = -1  # the peer of a receive from any rank
OVER = ("gone", "left", "closed")  # states of ranks that will not come back
_BUSY = 0.5  # of a core: who uses more computes


@dataclass(frozen=True)
class Wait:
    """A wait of one rank.

    Attributes:
        peer: For which rank of the job; `ANYONE` for any.
        seconds: How long.
        what: What it waits for, in words: "in all_reduce(...) at train.py:12 step()".
        message: Whether in send or recv.
    """

    peer: int
    seconds: float
    what: str
    message: bool = False


@dataclass(frozen=True)
class RankStatus:
    """A rank.

    Attributes:
        rank: Its number in the job.
        pid: Its process.
        state: ``waits``, ``in a call``, ``computes``, ``sleeps``, ``blocked``, ``stopped``,
            ``absent`` (it has not joined), ``elsewhere`` (on another host), ``left``, ``closed``
            or ``gone``.
        call: Its newest call, in words; empty before the first.
        site: Where in the program it was made.
        calls: How many it has made, in all communicators.
        inside: Whether it has not returned from the newest.
        step: How far it has to wait for its peer in the plan; None where it does not wait.
        waits: Its longest wait, or None.
        calls_per_s, busy, ready: Calls, seconds of processor time, and seconds without a core
            though ready to run, per second.
        faults_per_s: Pages that had to come from a disk, per second.
        heap_bytes: Symmetric memory that it holds.
        rss_bytes, swap_bytes: Memory of its process, and what of that lies in swap.
        cores: How many it may use.
        why: Why it left.
        waiting: Share of the time in which it waited.
        blamed: Share of the time in which others waited, in the end, for it.
        small: Share of the time in which it was in calls of at most 16 KiB.
        growth: Bytes per second by which its memory only grew.
        queued: Calls in the background that it has not begun.
        skew_s: How much later than the rank that waits most it enters a call, on average.
        host: Another host that it runs on; empty for this one.
    """

    rank: int
    pid: int
    state: str
    call: str
    site: str
    calls: int
    inside: bool
    step: int | None
    waits: Wait | None
    calls_per_s: float
    busy: float
    ready: float
    faults_per_s: float
    heap_bytes: int
    rss_bytes: int
    swap_bytes: int
    cores: int
    why: str
    waiting: float = 0.0
    blamed: float = 0.0
    small: float = 0.0
    growth: float = 0.0
    queued: int = 0
    skew_s: float = 0.0
    host: str = ""

    @property
    def where(self) -> str:
        """The newest call, and its place in the program."""
        return made_at(self.call, self.site)


@dataclass(frozen=True)
class Status:
    """A job, between two looks at it.

    Attributes:
        number: What names it.
        command: Its command line.
        interval_s: Time between the looks.
        ranks: Its ranks.
        communicators: World size and number of calls of each communicator.
        failure: What has ended its first communicator, or None.
        links: Its connections over TCP, from ranks of this host.
        traffic: By collective, calls and bytes of arrays per second, of one rank of each
            communicator.
        key: What names it on all its hosts.
    """

    number: int
    command: str
    interval_s: float
    ranks: list[RankStatus]
    communicators: list[dict[str, int]]
    failure: dict[str, Any] | None
    links: list[LinkState] = field(default_factory=list)
    traffic: dict[str, tuple[float, float]] = field(default_factory=dict)
    key: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def status(number: int | None = None, interval_s: float = 0.5, key: int | None = None) -> Status:
    """Look at a job for some time; see `pycoll.observe.look.look`."""
    before = look(number, key=key)
    shares = watch(before, interval_s)
    return compare(before, look(before.number), shares)


def compare(before: Look, after: Look, shares: Shares) -> Status:
    """Return the status of a job at the second of two looks, with what was seen between them."""
    earlier = {group.key: group for group in before.groups}
    seconds = max(after.when - before.when, 1e-9)
    ranks = [
        _rank(rank, seconds, before, after, [(g, earlier.get(g.key)) for g in after.groups], shares)
        for rank in range(after.world_size)
    ]
    sizes = [
        {"world_size": len(g.ranks), "calls": max(r["call_seq"] for r in g.ranks)}
        for g in after.groups
        if not g.stages
    ]
    failure = next((g.failure for g in after.groups[:1]), None)
    links = states(before.links, after.links)
    traffic = {kind: (n / seconds, size / seconds) for kind, (n, size) in shares.traffic.items()}
    rest = sizes, failure, links, traffic, after.groups[0].key
    return Status(after.number, after.command, seconds, skewed(ranks), *rest)


def skewed(ranks: list[RankStatus]) -> list[RankStatus]:
    """Return ranks with their skew, as far as the others tell."""
    return [replace(rank, skew_s=_skew(rank, ranks)) for rank in ranks]


def _skew(rank: RankStatus, ranks: list[RankStatus]) -> float:
    """Compare waits: ranks leave a call together, so who waits less has entered it later."""
    if rank.state in (*OVER, "absent", "elsewhere"):
        return 0.0
    if rank.calls_per_s > 0:
        most = max(other.waiting for other in ranks)
        return (most - rank.waiting) / rank.calls_per_s
    waits = [other.waits.seconds if other.waits else 0.0 for other in (rank, *ranks)]
    return max(waits) - waits[0]


def _rank(
    rank: int,
    seconds: float,
    before: Look,
    after: Look,
    groups: list[tuple[Group, Group | None]],
    shares: Shares,
) -> RankStatus:
    sights = [(g, g.ranks[g.members.index(rank)], old) for g, old in groups if rank in g.members]
    sights.sort(key=lambda entry: entry[0].stages)  # what they are stages of comes first
    made, waits, newest = 0, [], None
    for group, sight, old in sights:
        if group.stages:
            waits += _waits(group, sight, newest[1] if newest else None)
            continue
        then = old.ranks[old.members.index(rank)]["call_seq"] if old and rank in old.members else 0
        made += sight["call_seq"] - then
        waits += _waits(group, sight)
        call = sight["calls"][-1] if sight["calls"] else None
        # The call that it is in; else that of the communicator where it has made calls lately.
        order = (call is not None and not call["done"], sight["call_seq"] - then, call is not None)
        if newest is None or order > newest[0]:
            newest = order, call
    call = newest[1] if newest else None
    wait = max(waits, key=lambda entry: entry[0].seconds, default=(None, None))
    own = after.groups[0].ranks[rank]
    process = after.processes[rank]
    earlier = before.processes[rank] if rank < before.world_size else None
    rates = _rates(earlier, process, seconds)
    inside = call is not None and not call["done"]
    return RankStatus(
        rank,
        own["pid"],
        _state(own, process, wait[0], inside, rates[0]),
        _words(call),
        call["site"] if call else "",
        sum(sight["call_seq"] for group, sight, _ in sights if not group.stages),
        inside,
        wait[1],
        wait[0],
        made / seconds,
        *rates,
        after.heap_bytes[rank],
        process.rss_bytes if process else 0,
        process.swap_bytes if process else 0,
        process.cores if process else 0,
        own["text"],
        *shares.of(rank, after.world_size),
        sum(sight["queued"] for _, sight, _ in sights),
    )


def _rates(
    before: Process | None, now: Process | None, seconds: float
) -> tuple[float, float, float]:
    """Return processor time, time without a core, and pages from a disk, per second."""
    if before is None or now is None:
        return 0.0, 0.0, 0.0
    return (
        (now.cpu_s - before.cpu_s) / seconds,
        (now.ready_s - before.ready_s) / seconds,
        (now.faults - before.faults) / seconds,
    )


def _words(call: dict[str, Any] | None) -> str:
    if call is None:
        return ""
    what = Call.unpack(call["descriptor"], call["count"])
    return f"{what.kind} {what.dtype}[{what.count}]" if what.kind != "barrier" else what.kind


def _waits(
    group: Group, sight: dict[str, Any], outer: dict[str, Any] | None = None
) -> list[tuple[Wait, int | None]]:
    found: list[tuple[Wait, int | None]] = []
    if sight["waiting_peer"] >= 0 and not sight["arrived"] and group.failure is None:
        call = outer or (sight["calls"][-1] if sight["calls"] else None)
        peer = group.members[sight["waiting_peer"]]
        step = sight["waiting_step"]
        what = f"in {made_at(_words(call), call['site'] if call else '')}"
        if step not in (0, ENTERED, DONE):
            what += f", step {step - 1}"
        found.append((Wait(peer, sight["waiting_s"], what), step))
    if sight["message_way"]:
        peer = sight["message_peer"]
        way = "send" if sight["message_way"] == _SEND else "recv"
        what = f"in {way}(tag={sight['message_tag']})"
        who = group.members[peer] if peer >= 0 else ANYONE
        found.append((Wait(who, sight["message_s"], what, message=True), None))
    return found


def _state(own: dict, process: Any, wait: Wait | None, inside: bool, busy: float) -> str:
    if own["phase"] == ABSENT:
        return "absent"
    if own["phase"] == ELSEWHERE:
        return "elsewhere"
    if own["phase"] in (LEFT, CLOSED):
        return "left" if own["phase"] == LEFT else "closed"
    if process is None:
        return "gone"
    if process.state in "Tt":
        return "stopped"
    if wait is not None:
        return "waits"
    if inside:
        return "in a call"
    if process.state == "D":
        return "blocked"
    return "computes" if busy >= _BUSY or process.state == "R" else "sleeps"

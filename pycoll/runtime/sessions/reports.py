"""Turns the engine's snapshot of all ranks into an error: who, what, where, and what to do.

The engine knows numbers only; names of collectives, types and operations are added here.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pycoll import _C, errors
from pycoll.runtime.calls.call_sites import MADE_FOR
from pycoll.runtime.calls.descriptors import FIELDS, FUNCTION, Call
from pycoll.schedule.lowering.plan import DONE, ENTERED, FAILED
from pycoll.types import Kind, type_name

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "blocked in the kernel",
    "R": "running",
    "S": "sleeping",
    "Z": "dead, not yet reaped",
}
_REACHED = {0: "is in", ENTERED: "is in", DONE: "has done its part of", FAILED: "has given up"}
_WANTED = {0: "to make this call", ENTERED: "to make this call", DONE: "to be done with it"}
PLANS = "plans of the algorithm"  # what differs if none of these does
SIZES = "sizes of the blocks"  # likewise in a v-variant that was given them on every rank
_CAUSES = {1: "MismatchError", 2: "PeerLost", 3: "PeerLeft", 4: "CollTimeout"}  # of `Cause`
_INTERRUPT = 5  # Cause::kInterrupt
_RECV = 2  # MessageWay::kRecv


def describe(
    kind: str,
    text: str,
    report: dict[str, Any] | None,
    members: Sequence[int] | None = None,
    way_on: str = "",
    early: Sequence[tuple[int, int, int, str]] = (),
) -> errors.CollError:
    """Make the exception for a failure of the engine; the method `way_on` goes on after it.

    Args:
        kind: Its class.
        text: What the engine says.
        report: What it knows of all ranks.
        members: Rank in the job of each rank.
        way_on: A method that goes on after it.
        early: Number, descriptor, count and line of calls that this rank has left early.
    """
    cls = getattr(errors, kind, errors.CollError)
    text = re.sub(r"dtype#(\d+)", lambda found: type_name(int(found[1])), text)
    if report is None:
        return cls(text + _left_early(early))
    for rank in report["ranks"]:
        rank["in_job"] = members[rank["rank"]] if members else rank["rank"]
    writer = {
        "MismatchError": _mismatch,
        "CollTimeout": _timeout,
        "PeerLost": _lost,
        "PeerLeft": _left,
        "Revoked": None if _over_messages(report) else _revoked,
    }.get(kind)
    about_this = _CAUSES.get(report["cause"], "Revoked") == kind  # not about how another rank ended
    if writer and report["ranks"] and about_this:
        error = writer(report) + ("" if kind == "MismatchError" else _left_early(early))
    elif issubclass(cls, (errors.TransportError, errors.MismatchError)):
        error = f"{text.rstrip('.')}. {_ADVICE}"
    else:
        return cls(text + _left_early(early))
    made = cls(error.replace(_ADVICE, _WAYS[way_on]) if way_on and cls in _ENDS else error)
    if isinstance(made, errors.CollTimeout):
        made.missing = tuple(rank["rank"] for rank in report["ranks"] if not rank["entered"])
    return made


_FEW = 16  # ranks that have a line each
_ADVICE = "The communicator cannot be used any more; make a new one after fixing the cause."
_ENDS = (errors.PeerLost, errors.PeerLeft, errors.Revoked, errors.CollTimeout)
_WAYS = {
    "shrink": "The communicator cannot be used any more; call its shrink() to go on with the ranks "
    "that are left, or make a new one after fixing the cause.",
    "grow": "The communicator cannot be used any more; call its grow() to go on with the ranks "
    "that are left and those that come.",
}


def _left_early(calls: Sequence[tuple[int, int, int, str]]) -> str:
    """Name calls that other ranks may not have made."""
    said = [f"call {n}: {made_at(Call.unpack(word, m), site)}" for n, word, m, site in calls]
    head = "\nBefore that this rank has left calls early, which others may not have made:"
    return "\n  ".join([head, *said]) if said else ""


def _over_messages(report: dict) -> bool:
    return any("answered" in rank for rank in report["ranks"])  # their words are plain already


def _who(rank: dict) -> str:
    also = f"rank {rank['in_job']} of the job, " if rank["in_job"] != rank["rank"] else ""
    return f"rank {rank['rank']} ({also}process {rank['pid']})"


def _where(rank: dict) -> str:
    return f" at {rank['site']}" if rank["site"] else ""


def made_at(call: object, site: str) -> str:
    """Name a call and its place; of one that pycoll makes for its `init`, that."""
    if site.startswith(MADE_FOR):
        return site
    return f"{call} at {site}" if site else str(call)


def blame(said: Mapping[int, object]) -> str:
    """Name the ranks that said something else than most did; empty if that is not clear."""
    texts = {rank: str(what) for rank, what in said.items()}
    best = Counter(texts.values()).most_common()  # with a number it imports, even at exit
    if len(best) < 2 or best[0][1] == best[1][1]:
        return ""
    odd = [str(rank) for rank, text in texts.items() if text != best[0][0]]
    return f": rank {', '.join(odd)} differs from the others"


def _mismatch(report: dict) -> str:
    ranks = report["ranks"]
    now = [r for r in ranks if r["entered"]]
    calls = {r["rank"]: Call.unpack(r["descriptor"], r["count"]) for r in now}
    fields = [f for f in FIELDS if len({getattr(c, f) for c in calls.values()}) > 1]
    sized = all(call.kind.endswith("_v") for call in calls.values())
    functions = all(call.op == FUNCTION for call in calls.values())
    field = fields[0] if fields else SIZES if sized else "function" if functions else PLANS
    refused = {report["culprit"]: report["text"]} if report["text"] else {}
    lines = [f"ranks called different things; field '{field}' differs{blame(calls)}"]
    if refused:
        lines = [f"rank {report['culprit']} has refused a call that others may have left early"]
    lines += each_says(
        {
            rank["rank"]: f"{calls[rank['rank']]}{_where(rank)}"
            if rank["rank"] in calls
            else refused.get(rank["rank"], "has not made this call yet")
            for rank in ranks
        }
    )
    if early := [rank["rank"] for rank in ranks if rank.get("left_early")]:
        left = f"It was call {report['iteration']}, which {_numbers(early)} had left"
        lines.append(f"{left} early, as strict='next' allows.")
    kinds = {call.kind for call in calls.values()}
    if field == "count" and (own := f"{kinds.pop()}_v".upper()) in Kind.__members__:
        lines.append(f"Blocks of different sizes are for {own.lower()}.")
    return "\n".join(lines) + "\n" + _ADVICE


def each_says(said: Mapping[int, str]) -> list[str]:
    """Return a line for each rank; of more than 16, one for all that say the same, fewest first."""
    if len(said) <= _FEW:
        return [f"  rank {rank}: {text}" for rank, text in said.items()]
    groups: dict[str, list[int]] = {}
    for rank, text in said.items():
        groups.setdefault(text, []).append(rank)
    found = sorted(groups.items(), key=lambda group: len(group[1]))
    return [f"  {'each of ' * (len(g) > 1)}{_numbers(g)}: {text}" for text, g in found]


def _numbers(ranks: Sequence[int]) -> str:
    """Name ranks, as few numbers as can be: ``ranks 0-5, 7``."""
    parts: list[str] = []
    for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        row = [rank for _, rank in group]
        parts.append(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def _progress(rank: dict, many: bool) -> str:
    """Say what a rank does; its process is not named where there are many of them."""
    state = _STATES.get(rank["state"], "")
    asleep = state and rank["state"] != "R" and not (many and rank["state"] == "S")
    process = f" (process {rank['pid']} is {state})" if asleep else ""
    last = Call.unpack(rank["descriptor"], rank["count"])
    if rank["waiting_peer"] >= 0:
        wanted = _WANTED.get(rank["waiting_step"], f"to finish step {rank['waiting_step'] - 1}")
        inside = f"is in {made_at(last, rank['site'])}"
        return f"{inside}, waits for rank {rank['waiting_peer']} {wanted}{process}"
    if not rank.get("answered", True):
        where = f"process {rank['pid']} on {rank['host']}"
        return f"does not answer; {where} is busy elsewhere, stopped or dead"
    if not rank["entered"]:
        made = f"last call: {made_at(last, rank['site'])}"
        what = made if rank["descriptor"] else "no call so far"
        return f"has not made this call; {what}{process}"
    reached = _REACHED.get(rank["step"], f"has reached step {rank['step'] - 1} of")
    return f"{reached} {made_at(last, rank['site'])}{process}"


def what_ranks_do(session: Any) -> list[str]:
    """Say of each rank of this host what it does now, and whom it waits for.

    Of ranks that reach each other by messages only this one is known.
    """
    seen = _seen(session)
    return [_moment(seen[rank]) for rank in sorted(seen)]


def what_others_do(session: Any) -> str:
    """Say likewise of other ranks, a line each; nothing if they are many, or all is closed."""
    with contextlib.suppress(errors.CommClosed):
        seen = _seen(session)
        others = [seen[rank] for rank in sorted(seen) if rank != session.rank]
        return "".join(f"\n  {_moment(s)}" for s in others) if len(others) < _FEW else ""
    return ""


def _seen(session: Any) -> dict[int, dict]:
    node = getattr(session, "node", None)
    shared = session.control if node is None else node.control
    seen = {}
    if shared is not None:
        view = shared.sight()
        numbers = range(view.world_size) if node is None else node.members
        seen = {rank: _renumbered(view.rank(i, 1), numbers) for i, rank in enumerate(numbers)}
    own = None if session.control is not None else session.engine.look(1)
    if own is not None and (own["waiting_peer"] >= 0 or session.rank not in seen):
        seen[session.rank] = {**own, "rank": session.rank}
    return seen


def _renumbered(sight: dict, numbers: Sequence[int]) -> dict:
    """Return what a rank of a host shows with the numbers that ranks have in the whole."""
    peer = sight["waiting_peer"]
    end = sight["message_peer"]
    changed = {"rank": numbers[sight["rank"]], "waiting_peer": numbers[peer] if peer >= 0 else peer}
    changed["message_peer"] = numbers[end] if end >= 0 else end
    return {**sight, **changed}


def _moment(sight: dict) -> str:
    state, process = state_of(sight["pid"]), ""
    if state in "TtDZ":
        process = f" (process {sight['pid']} is {_STATES[state]})"
    return f"rank {sight['rank']}: {_doing(sight)}{process}"


def _doing(sight: dict) -> str:
    if sight["message_way"]:
        peer = sight["message_peer"]
        way = "recv" if sight["message_way"] == _RECV else "send"
        who = f"rank {peer}" if peer >= 0 else "any rank"
        return f"is in {way}(tag={sight['message_tag']}), waits for {who}"
    calls = sight["calls"]
    if not calls:
        return "has made no call so far"
    last = Call.unpack(calls[-1]["descriptor"], calls[-1]["count"])
    text = made_at(last, calls[-1]["site"])
    if calls[-1]["done"]:
        return f"is in no call; last call: {text}"
    if sight["waiting_peer"] < 0 or sight["arrived"]:
        return f"is in {text}"
    peer, step = sight["waiting_peer"], sight["waiting_step"]
    wanted = _WANTED.get(step, f"to finish step {step - 1}")
    return f"is in {text}, waits for rank {peer} {wanted}"


def state_of(pid: int) -> str:
    """Return the state of a process, a letter as in /proc; ``"?"`` if there is none."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    return "?"


def _timeout(report: dict) -> str:
    waited = report["ranks"][report["reporter"]]["waiting_s"]
    who = report["ranks"][report["reporter"]]["rank"]
    lines = [f"rank {who} gave up after waiting {waited:.3g} s"]
    ranks = report["ranks"]
    lines += each_says({rank["rank"]: _progress(rank, len(ranks) > _FEW) for rank in ranks})
    return "\n".join(lines) + "\n" + _ADVICE


def _last_call(rank: dict) -> str:
    last = made_at(Call.unpack(rank["descriptor"], rank["count"]), rank["site"])
    return f"; its last call was {last}" if rank["descriptor"] else ""


def _lost(report: dict) -> str:
    dead = report["ranks"][report["culprit"]]
    return f"{_who(dead)} died{_last_call(dead)}. {_ADVICE}"


def _revoked(report: dict) -> str:
    who = report["ranks"][report["culprit"]]
    what = "was interrupted" if report["cause"] == _INTERRUPT else "aborted the communicator"
    did = f"{what} ({report['text']})" if report["text"] else what
    return f"rank {who['rank']} {did} (process {who['pid']}){_last_call(who)}. {_ADVICE}"


def _left(report: dict) -> str:
    gone = report["ranks"][report["culprit"]]
    reason = gone["text"] or "it closed its communicator, or its program has ended"
    left = "left" if reason.startswith(_BECAUSE) else "left:"
    end = "\n" if "\n" in reason else ". "
    return f"{_who(gone)} {left} {reason.rstrip('.')}{end}{_ADVICE}"


_BECAUSE = "because "
_LEFT = re.compile(rf"rank \d+ \([^)]*\) left {_BECAUSE}")
_NAMES_RANKS = (errors.TransportError, errors.MismatchError, errors.PeerRejected)


def why_left(error: BaseException) -> str:
    """Return for the peers why an exception makes this rank leave; of a chain the first cause.

    What to do next is left out: whoever reads it hears that for a communicator of its own.
    """
    cause = error.__cause__
    if isinstance(cause, _NAMES_RANKS) and str(cause) in errors.in_words(error):
        error = cause  # such as an error of PyTorch with the text of pycoll's
    text = errors.in_words(error)
    for advice in (_ADVICE, *_WAYS.values()):
        text = text.replace(advice, "")
    text = text.rstrip(" \n")
    if not isinstance(error, _NAMES_RANKS):
        return text
    said = text.partition(": ")[2]
    return _BECAUSE + said[found.end() if (found := _LEFT.match(said)) else 0 :]


def raising(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the engine where there is no communicator yet, with pycoll's exceptions."""
    try:
        return function(*args, **kwargs)
    except _C.EngineError as error:
        raise describe(*error.args, None) from None

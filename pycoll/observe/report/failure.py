"""What the dumps of a failure say: which rank left the common path, and where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.observe.dump import FORMAT
from pycoll.runtime.sessions.reports import made_at

_SHOWN = 3  # calls before the odd one


def read_dumps(folder: str | Path) -> list[dict[str, Any]]:
    """Return the dumps in a folder, by rank; an empty list if there are none."""
    found = []
    for path in sorted(Path(folder).glob("rank*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["pycoll_dump"] != FORMAT:
                raise ValueError(f"format {value['pycoll_dump']!r}, expected {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{str(path)!r} is no dump of pycoll: {error}") from None
        found.append(value)
    return sorted(found, key=lambda dump: (-dump["world_size"], dump["rank"]))


def explain(dumps: list[dict[str, Any]]) -> list[str]:
    """Return the story of a failure in lines, the first of which names rank and cause."""
    first = dumps[0]
    same = [dump for dump in dumps if dump["communicator"] == first["communicator"]]
    odd = _odd(same)
    lines = [odd[0] if odd else _by_error(same)]
    lines += odd[1:]
    silent = [rank for rank in first["members"] if rank not in {dump["rank"] for dump in same}]
    if silent:
        lines.append(f"no dump of rank {_list(silent)}: it was killed, or made no call any more")
    lines.append("")
    for dump in same:
        place = f"process {dump['pid']} on {dump['host']}"
        words = dump["error"]["text"].splitlines() or [""]
        lines.append(f"rank {dump['rank']} ({place}): {dump['error']['type']}: {words[0]}")
        lines += [f"    {text}" for text in _stack(dump)]
    return lines


def _odd(dumps: list[dict[str, Any]]) -> list[str]:
    """Tell where the calls of one rank differ from those of most others, if they do."""
    path: dict[int, dict[int, dict[str, Any]]] = {}
    for dump in dumps:
        for seen in dump["ranks"]:
            for call in seen["calls"]:
                path.setdefault(seen["rank"], {})[call["call_seq"]] = call
    common = sorted(set.union(*(set(calls) for calls in path.values()))) if path else []
    for seq in common:
        said = {rank: _key(calls[seq]) for rank, calls in path.items() if seq in calls}
        if len(set(said.values())) < 2:
            continue
        usual, times = Counter(said.values()).most_common(1)[0]
        odd = [rank for rank, what in said.items() if what != usual] if times > 1 else []
        return list(_tell(path, seq, odd or list(said), usual))
    return []


def _tell(path: dict, seq: int, odd: list[int], usual: tuple) -> Iterator[str]:
    rank = odd[0]
    own = path[rank][seq]
    other = next(
        (calls[seq] for calls in path.values() if seq in calls and _key(calls[seq]) == usual), own
    )
    differs = _key(own) != usual
    noun = "rank" if len(odd) == 1 else "ranks"
    yield (
        f"{noun} {_list(odd)} left the common path at call {seq}: "
        + f"{_kind(own)}{_at(own)}"
        + (f", where the others called {_kind(other)}{_at(other)}" if differs else "; all differ")
    )
    yield f"  {own['call']}{_at(own)}"
    if differs:
        yield f"  {other['call']}{_at(other)}"
    before = [path[rank][s] for s in range(seq - _SHOWN, seq) if s in path[rank]]
    if before:
        yield "  before that, all ranks agreed:"
        yield from (f"    call {call['call_seq']}: {call['call']}{_at(call)}" for call in before)


def _by_error(dumps: list[dict[str, Any]]) -> str:
    """Name the rank that the report of the engine blames, else what the first error says."""
    for dump in dumps:
        report = dump["report"]
        if report and report.get("ranks"):
            who = report["ranks"][report["culprit"]]
            rank = dump["members"][report["culprit"]]
            last = _last(dump, rank)
            what = _CAUSES.get(report["cause"], "failed")
            why = (
                f" ({report['text'] or who.get('text')})"
                if report["text"] or who.get("text")
                else ""
            )
            return f"rank {rank} {what}{why}{last}"
    error = dumps[0]["error"]
    words = error["text"].splitlines() or [""]
    return f"rank {dumps[0]['rank']} raised {error['type']}: {words[0]}"


_CAUSES = {  # Cause of csrc/memory/control.h
    1: "made another call than its peers",
    2: "died",
    3: "left",
    4: "did not do its part in time",
    5: "was interrupted",
    6: "aborted the communicator",
}


def _last(dump: dict[str, Any], rank: int) -> str:
    calls = next((seen["calls"] for seen in dump["ranks"] if seen["rank"] == rank), [])
    if not calls:
        return "; it had made no call"
    call = calls[-1]
    ended = "its last call was" if call["done"] else "it was in"
    return f"; {ended} call {call['call_seq']}, {made_at(_kind(call), call['site'])}"


def _stack(dump: dict[str, Any]) -> list[str]:
    main = next((s for s in dump["stacks"] if s["thread"] == "MainThread"), None)
    frames = main["frames"][-4:] if main else []
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames]


def _key(call: dict[str, Any]) -> tuple[int, int]:
    return call["descriptor"], call["count"]


def _kind(call: dict[str, Any]) -> str:
    return call["call"].partition("(")[0]


def _at(call: dict[str, Any]) -> str:
    return f" at {call['site']}" if call["site"] else ""


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))

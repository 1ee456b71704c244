"""Dumps in the format of PyTorch's flight recorder, for the analyzer that comes with it.

One pickle for each rank whose calls are known, as
`python -m torch.distributed.flight_recorder.fr_trace` of PyTorch 2.13 reads them.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.runtime.calls.descriptors import Call
from pycoll.schedule.language.collectives import COLLECTIVES, OWN

_VERSION = "2.10"
_BACKEND = "gloo"  # the analyzer knows no names but those of PyTorch's own backends
_PREFIX = "rank_"
_MISMATCH, _LOST = 1, 2  # Cause of csrc/memory/control.h
_NAMES = {  # as the analyzer knows them; those of what PyTorch has not, stand for nothing else
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "gather_v": "gather",
    "scatter_v": "scatter",
    "all_to_all": "all_to_all_single",
    "all_to_all_v": "all_to_all_v_single",
    "check": "all_reduce_barrier",
    "scan": "_reduce_oop",
    "exscan": "_broadcast_oop",
}
_SAME = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "split"),
    *("all_gather_v", "reduce_scatter_v"),
)
_OTHER = "new_window"  # refused arguments

Calls = dict[int, list[dict[str, Any]]]


def write(dumps: list[dict[str, Any]], folder: str | Path) -> int:
    """Write a file ``rank_R`` for each rank R whose calls are known, and return how many.

    Raises:
        ArgumentError: If the folder cannot be written, or is not empty.
    """
    at = Path(folder)
    found = ranks(dumps)
    try:
        at.mkdir(parents=True, exist_ok=True)
        if any(at.iterdir()):
            raise ArgumentError(
                f"{str(at)!r} is not empty; the analyzer reads all files of a folder"
            )
        for rank, value in found.items():
            (at / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(value))
    except OSError as error:
        raise ArgumentError(f"cannot write to {str(at)!r}: {error}") from None
    return len(found)


def ranks(dumps: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by rank what PyTorch's flight recorder would have written."""
    found: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(dict.fromkeys(dump["communicator"] for dump in dumps)):
        same = [dump for dump in dumps if dump["communicator"] == name]
        members, size = same[0]["members"], same[0]["world_size"]
        group = {"name": str(number), "desc": f"communicator {name}", "ranks": str(members)}
        status = {"last_enqueued_collective": -1, "last_started_collective": -1}
        for rank, calls in _together(same).items():
            own = found.setdefault(
                rank, {"version": _VERSION, "pg_config": {}, "pg_status": {}, "entries": []}
            )
            own["pg_config"][group["name"]] = group
            done = [call["call_seq"] for call in calls if call["done"]]
            newest = calls[-1]["call_seq"] if calls else -1
            own["pg_status"][group["name"]] = {key: newest for key in status} | {
                "last_completed_collective": done[-1] if done else -1
            }
            when = int(same[0]["when"] * 1e9)
            # What the analyzer aligns ranks by; their calls begin together.
            first = len(own["entries"])
            own["entries"] += [
                _entry(call, group, size, when) | {"record_id": first + i}
                for i, call in enumerate(calls)
            ]
    return found


def _together(dumps: list[dict[str, Any]]) -> Calls:
    """Return the calls of each rank of a communicator, from the first that is known of all on.

    Those of a rank are from its own dump, else from one of a rank that shares memory with it. A
    rank that had not entered the call that failed makes it afterwards, to be told of the failure;
    that is left out.
    """
    calls: Calls = {}
    for dump in sorted(dumps, key=lambda dump: dump["when"]):
        for seen in dump["ranks"]:
            if seen["rank"] == dump["rank"] or seen["rank"] not in calls:
                calls[seen["rank"]] = [dict(call) for call in seen["calls"]]
    report = next((d["report"] for d in dumps if d["report"] and d["report"].get("ranks")), None)
    if report is not None and report["cause"] != _MISMATCH:
        for place, known in enumerate(report["ranks"]):
            own = calls.get(dumps[0]["members"][place], [])
            if not known["entered"]:
                own[:] = [call for call in own if call["iteration"] < report["iteration"]]
            elif report["cause"] == _LOST and place == report["culprit"] and own:
                own[-1]["lost"] = True
    begin = max((own[0]["call_seq"] for own in calls.values() if own), default=0)
    return {r: [c for c in own if c["call_seq"] >= begin] for r, own in sorted(calls.items())}


def _entry(call: dict[str, Any], group: dict[str, str], size: int, when: int) -> dict[str, Any]:
    what = Call.unpack(call["descriptor"], call["count"])
    name = what.kind if what.kind in _SAME else f"{_NAMES.get(what.kind, _OTHER)} {what.kind}"
    spec = COLLECTIVES.get(what.kind)
    shapes = [
        [[what.count // size if spec is not None and layout == OWN else what.count]]
        for layout in ((spec.in_layout, spec.out_layout) if spec else ("", ""))
    ]
    place, _, function = call["site"].partition(" ")
    file, _, line = place.rpartition(":")
    started = "scheduled" if call.get("lost") else "started"  # it knows no dead ranks
    return {
        "pg_id": int(group["name"]),
        "process_group": (group["name"], group["desc"]),
        "collective_seq_id": call["call_seq"],
        "p2p_seq_id": 0,
        "op_id": call["call_seq"],
        "profiling_name": f"{_BACKEND}:{name}",
        "time_created_ns": when,
        "duration_ms": None,
        "input_sizes": shapes[0],
        "input_dtypes": [what.dtype],
        "output_sizes": shapes[1],
        "output_dtypes": [what.dtype],
        "state": "completed" if call["done"] else started,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": call["done"],
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [
            {"name": function, "filename": file, "line": int(line) if line.isdigit() else 0}
        ],
    }

"""The flight recorder: what led to an error, in one file for each rank."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pycoll.config import VERSION
from pycoll.observe.counters.stats import own_sight
from pycoll.runtime.calls.descriptors import Call

FORMAT = 1
_CALLS = 63  # of each rank, all that its memory has
_OWN = f"{os.sep}pycoll{os.sep}"


def write(
    session: Any, error: BaseException, report: dict[str, Any] | None, folder: str
) -> Path | None:
    """Write what is known on this rank about an error; None, and a warning, if that fails.

    The error is what the user has to hear of, so nothing is raised here.
    """
    rank = (session.job_ranks or session.members or range(session.world_size))[session.rank]
    at = Path(folder)
    try:
        at.mkdir(parents=True, exist_ok=True)
        found = contents(session, error, report)
        path = at / f"rank{rank}-{found['communicator']}.json"
        _put(path, json.dumps(found, indent=1, default=str))
        return path
    except (OSError, ValueError) as problem:
        with contextlib.suppress(Warning):  # which this program has made an error
            text = f"nothing about an error was written to {folder}: {problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


def _put(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    fresh = path.with_suffix(f".tmp{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def contents(session: Any, error: BaseException, report: dict[str, Any] | None) -> dict[str, Any]:
    """Return all that a dump says."""
    members = list(session.job_ranks or session.members or range(session.world_size))
    return {
        "pycoll_dump": FORMAT,
        "rank": members[session.rank],
        "place": session.rank,
        "world_size": session.world_size,
        "members": members,
        "communicator": f"{session.cookie:016x}",
        "transport": session.transport,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "when": time.time(),
        "versions": {
            "pycoll": VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kernel": platform.release(),
        },
        "error": {"type": type(error).__name__, "text": str(error)},
        "report": report,
        "ranks": list(_ranks(session, members)),
        "stacks": stacks(),
    }


def _ranks(session: Any, members: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what ranks show of themselves: all of them where they share memory, else this one."""
    sight = session.control.sight() if session.control is not None else None
    for place, member in enumerate(members):
        if sight is not None:
            seen = sight.rank(place, _CALLS)
        elif place != session.rank or (seen := own_sight(session, _CALLS)) is None:
            continue
        for call in seen["calls"]:
            call["call"] = str(Call.unpack(call["descriptor"], call["count"]))
        yield seen | {"rank": member, "place": place}


def stacks() -> list[dict[str, Any]]:
    """Return the stacks of all threads of Python, the innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        frames = [
            {"filename": f.filename, "line": f.lineno, "name": f.name}
            for f in traceback.extract_stack(frame)
            if _OWN not in f.filename
        ]
        found.append({"thread": names.get(ident, str(ident)), "frames": frames})
    return found

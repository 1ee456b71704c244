"""Collectives you can read, prove and trust, at the speed of the hardware.

The names below are the stable interface; see `Communicator` for the collectives.
"""

from __future__ import annotations

import os
from dataclasses import replace

from pycoll import _C
from pycoll.comm import ANY, Communicator
from pycoll.config import Config
from pycoll.errors import (
    ArgumentError,
    CollError,
    CollTimeout,
    CommClosed,
    ConcurrentUseError,
    ForkedError,
    MismatchError,
    PeerLeft,
    PeerLost,
    PeerRejected,
    Revoked,
    ScheduleError,
    TransportError,
)
from pycoll.runtime.bootstrap import discover
from pycoll.runtime.groups import open_control
from pycoll.runtime.memory import Memory
from pycoll.runtime.reports import raising
from pycoll.runtime.session import Session
from pycoll.runtime.work import Work

__version__ = "0.1.0"


def init(
    *,
    timeout: float | None = None,
    heap_bytes: int | None = None,
    cell_bytes: int | None = None,
) -> Communicator:
    """Join the job of this process and return its communicator.

    Under ``pycoll run -n N`` there are N ranks; a process started alone is a world of one rank.

    Args:
        timeout: Seconds a call may wait for its peers before `CollTimeout`; by default 300, or
            ``PYCOLL_TIMEOUT``.
        heap_bytes: Capacity of this rank's symmetric heap; only what is allocated uses memory.
        cell_bytes: Staging memory for one iteration of a rank.

    Raises:
        TransportError: If the process cannot join, with the reason and what to do.
        ArgumentError: If a setting or a variable of the environment has no usable value.
    """
    given = {"timeout_s": timeout, "heap_bytes": heap_bytes, "cell_bytes": cell_bytes}
    config = replace(Config.from_env(), **{k: v for k, v in given.items() if v is not None})
    launch = discover()
    try:
        n = launch.world_size
        heap = raising(_C.Heap, launch.heap_fd, n, config.heap_bytes)
        control = open_control(launch.control_fd, n, config)
        session = Session(control, Memory(heap, launch.rank), launch.rank, n, config)
    finally:
        os.close(launch.control_fd)
        os.close(launch.heap_fd)
    return Communicator(session)


__all__ = [
    "ANY",
    "ArgumentError",
    "CollError",
    "CollTimeout",
    "CommClosed",
    "Communicator",
    "ConcurrentUseError",
    "Config",
    "ForkedError",
    "MismatchError",
    "PeerLeft",
    "PeerLost",
    "PeerRejected",
    "Revoked",
    "ScheduleError",
    "TransportError",
    "Work",
    "init",
]

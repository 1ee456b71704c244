"""Ranks that will not come: those who wait for them hear of it, and why."""

from __future__ import annotations

import os

from pycoll import _C
from pycoll.config import Launch
from pycoll.errors import CollError, CollTimeout, in_words
from pycoll.runtime.sessions.reports import raising

_LAYOUT_S = 2.0  # far longer than a rank takes to lay out the memory


def decline(launch: Launch, error: CollError) -> None:
    """Let the others know that this process cannot take its place in the job.

    Args:
        launch: The place.
        error: The reason.
    """
    _decline(launch.control_fd, launch.rank, in_words(error), _LAYOUT_S, os.getpid())


def tell_end(control_fd: int, rank: int, pid: int, end: str) -> bool:
    """Let the others know that the process of a rank is over; nothing happens if it had joined.

    Args:
        control_fd: Descriptor of the control memory.
        rank: The rank.
        pid: Its process.
        end: How it ended, as "exited with code 0".

    Returns:
        Whether they will know. If not, somebody lays out the memory right now: try again soon.
    """
    return _decline(control_fd, rank, f"it {end} before it joined", 0.0, pid)


def _decline(control_fd: int, rank: int, text: str, timeout_s: float, pid: int) -> bool:
    try:
        raising(_C.Control.decline_at, control_fd, rank, text, timeout_s, pid)
    except CollTimeout:
        return False
    except CollError:  # it has taken its place, or declined, before
        return True
    return True

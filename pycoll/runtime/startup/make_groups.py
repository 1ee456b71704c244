"""Making communicators: the memory of a group, and groups out of groups."""

from __future__ import annotations

import os

import numpy as np

from pycoll import _C
from pycoll.config import Config, Launch
from pycoll.errors import ArgumentError, CollError, CollTimeout, TransportError, in_words
from pycoll.runtime.calls.parts.exchange import exchange, in_parts
from pycoll.runtime.sessions.message_session import MpiSession
from pycoll.runtime.sessions.reports import raising
from pycoll.runtime.sessions.session import Session
from pycoll.runtime.startup.bootstrap import adopt, make_memfd
from pycoll.runtime.startup.room import mailbox_bytes
from pycoll.types import Kind

_LAYOUT_S = 2.0  # far longer than a rank takes to lay out the memory


def open_control(
    fd: int, world_size: int, config: Config, timeout_s: float | None = None
) -> _C.Control:
    """Map the control memory of a communicator; the first rank to come lays it out.

    The descriptor still belongs to the caller.

    Raises:
        TransportError: If the memory cannot be had or was laid out with other settings.
        CollTimeout: If another rank takes longer to lay it out than calls may wait.
        PeerLeft: If another rank cannot join.
    """
    return raising(
        _C.Control,
        fd,
        world_size,
        cell_bytes=config.cell_bytes,
        mailbox_bytes=mailbox_bytes(world_size),
        timeout_s=config.timeout_s if timeout_s is None else timeout_s,
    )


def decline(launch: Launch, error: CollError) -> None:
    """Let the others know that this process cannot take its place in the job."""
    _decline(launch.control_fd, launch.rank, in_words(error), _LAYOUT_S, os.getpid())


def tell_end(control_fd: int, rank: int, pid: int, end: str) -> bool:
    """Let the others know that the process of a rank is over; nothing happens if it had joined.

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


@in_parts
def split(
    parent: Session, color: int | None, key: int, kind: type[Session] = Session
) -> Session | None:
    """Make sessions of the ranks with equal colours; see `pycoll.Communicator.split`.

    The lowest rank of each group makes the memory, and the others open it through ``/proc``. A rank
    that cannot join refuses the call: then nobody gets a group, and the parent stays as it was.
    """
    child = _split(parent, color, key, kind)
    parent.splits += 1
    if child is not None:
        parent.children[parent.splits] = child
        if parent.observer is not None:
            parent.observer.was_split(child)
        child.use(parent.tuning, parent.sharing)
    return child


def _split(parent: Session, color: int | None, key: int, kind: type[Session]) -> Session | None:
    wanted = parent.refusing(lambda: _wanted_group(color, key))
    table = _all_gather(parent, wanted)
    mine = np.flatnonzero((table[:, :2] == wanted[:2]).all(axis=1))
    group = mine[np.argsort(table[mine, 2], kind="stable")].tolist()
    if isinstance(parent, MpiSession):
        return parent.make_group(None if color is None else group)
    leads = color is not None and group[0] == parent.rank
    fd = parent.refusing(lambda: make_memfd("control")) if leads else -1
    child = None
    try:
        places = _all_gather(parent, np.array([os.getpid(), fd], np.int64))
        if color is not None:
            leader = places[group[0]].tolist()
            child = parent.refusing(lambda: _join(parent, *leader, group, kind))
        parent.call(Kind.BARRIER, None, None, "sum", 0, None)
    except BaseException:
        if child is not None:
            child.close()
        raise
    finally:
        if leads:
            os.close(fd)
    return child


def _wanted_group(color: int | None, key: int) -> np.ndarray:
    number = 0 if color is None else color
    for name, value in (("color", number), ("key", key)):
        if not isinstance(value, (int, np.integer)) or not -(2**63) <= value < 2**63:
            no_group = ", and None for a rank that gets no group" if name == "color" else ""
            raise ArgumentError(f"{name}={value!r}; accepted are integers of 64 bits{no_group}")
    return np.array([color is not None, number, key], np.int64)


def _all_gather(parent: Session, row: np.ndarray) -> np.ndarray:
    table = exchange(parent, Kind.SPLIT, row.tobytes())
    return np.frombuffer(table, row.dtype).reshape(parent.world_size, -1)


def _join(
    parent: Session, pid: int, leader_fd: int, group: list[int], kind: type[Session]
) -> Session:
    try:
        fd = adopt(pid, leader_fd)
    except TransportError:
        parent.guard(parent.engine.check_peers)  # it may have died: then that is what all hear
        raise
    try:
        return member(parent, fd, group, kind)
    finally:
        os.close(fd)


def member(
    parent: Session,
    fd: int,
    group: list[int],
    kind: type[Session],
    timeout_s: float | None = None,
) -> Session:
    """Make this rank's session in a group of ranks of its parent; `fd` is still the caller's."""
    control = open_control(fd, len(group), parent.config, timeout_s)
    rank, n = group.index(parent.rank), len(group)
    child = kind(control, parent.memory, rank, n, parent.config, parent.threads)
    child.members = [parent.members[r] for r in group] if parent.members else group
    return child

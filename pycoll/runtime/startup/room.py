"""Whether a job fits into the memory of its host: asked before, since the kernel kills.

Shared memory is reserved when it is made, and refused if it is not there (`reserve_pages` in
``csrc/memory/reservation.cpp``). What processes need for themselves nobody reserves, so it is
compared here with what the machine, or the limit of a container, leaves. Ranks that mpiexec or
torchrun has started are there already, and have theirs: what they still take is shared.
"""

from __future__ import annotations

from pycoll import _C
from pycoll.config import Config
from pycoll.errors import ArgumentError

RANK_BYTES = 16 << 20  # at least, of a process that has joined: Python, NumPy, the engine
_MAILBOX_TOTAL = 32 << 20
_MAILBOX_RANGE = (1 << 10, 256 << 10)


def mailbox_bytes(world_size: int) -> int:
    """Return the size of a mailbox, of which there is one for each pair of ranks."""
    low, high = _MAILBOX_RANGE
    return min(high, max(low, _MAILBOX_TOTAL // world_size**2)) // 64 * 64


def check_job(world_size: int, config: Config, available: int | None = None) -> None:
    """Refuse to start ranks that this host has no memory for.

    Raises:
        ArgumentError: With the bytes that they need at least, and those that are left.
    """
    own = world_size * RANK_BYTES
    shared = _C.Control.bytes(world_size, config.cell_bytes, mailbox_bytes(world_size))
    left = _C.available_memory() if available is None else available
    if own + shared > left:
        raise ArgumentError(
            f"{world_size} ranks need at least {own + shared} bytes of memory, and {left} are "
            f"available here: {own} for their processes and {shared} shared, of which staging "
            f"buffers have {2 * world_size * config.cell_bytes} (PYCOLL_CELL_BYTES). Start fewer "
            "ranks, or on more hosts"
        )

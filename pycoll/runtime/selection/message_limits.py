"""How large messages of a call are."""

from __future__ import annotations

from pycoll.schedule.ir import Schedule
from pycoll.schedule.language.collectives import COLLECTIVES

_SEGMENT_BYTES = 4 << 20  # of a chunk that one message carries
_WHOLE_BYTES = 1 << 30  # likewise, where no fold and no other message could begin earlier
_LINK_BYTES = 60 << 10
"""Likewise between hosts. Over TCP, Open MPI sends 64 KiB at once; before more it shakes hands, and
each word of that queues behind the data that goes the other way."""
_EAGER_BYTES = 3584  # of a message that is copied into a packet: both fit Open MPI's 4 KiB
_LINK_EAGER_BYTES = 32 << 10  # likewise between hosts, where to agree first costs a round trip

LINK_LIMITS = {"segment_bytes": _LINK_BYTES, "eager_bytes": _LINK_EAGER_BYTES}


def message_limits(schedule: Schedule, one_host: bool) -> dict[str, int]:
    """Return the bytes of a segment and of a packet, the same on every rank.

    A segment is what one message carries of a chunk; a message that fits a packet is copied.
    """
    if not one_host:
        return LINK_LIMITS
    moves = not COLLECTIVES[schedule.collective].reduces
    segment = _WHOLE_BYTES if moves and schedule.one_hop else _SEGMENT_BYTES
    return {"segment_bytes": segment, "eager_bytes": _EAGER_BYTES}

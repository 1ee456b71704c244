"""Who waits for whom how much of the time: many quick looks at a job, between two that are whole.

Nothing on the side of the job counts that, for it would cost every call something.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pycoll.observe.look import Group, Look

_PAUSE_S = 0.005
_COST = 4  # a look may take this part of the time: one in so many


@dataclass
class Shares:
    """What the looks have seen.

    Attributes:
        looks: How many there were.
        waits: How often each rank waited for another one.
        blamed: How often each rank was the one at the end of a wait: for whom somebody waited, and
            who waited for nobody.
    """

    looks: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    blamed: dict[int, int] = field(default_factory=dict)

    def waiting(self, rank: int) -> float:
        """Return the share of the time in which a rank waited."""
        return self.waits.get(rank, 0) / max(1, self.looks)

    def add(self, edges: dict[int, int]) -> None:
        """Count one look: for whom each waiting rank waits."""
        self.looks += 1
        for rank in edges:
            self.waits[rank] = self.waits.get(rank, 0) + 1
            at, path = rank, {rank}
            while at in edges and edges[at] not in path:
                at = edges[at]
                path.add(at)
            if at not in edges:
                self.blamed[at] = self.blamed.get(at, 0) + 1


def watch(seen: Look, seconds: float) -> Shares:
    """Look at a job for some time."""
    shares, until = Shares(), time.monotonic() + seconds
    sights = list(zip(seen.groups, seen.job.segments, strict=False))
    while (left := until - time.monotonic()) > 0:
        begin = time.monotonic()
        edges: dict[int, int] = {}
        for group, segment in sights:
            for place, rank in enumerate(group.members):
                own = segment.sight.rank(place, 0)
                peer = _awaited(group, own)
                if rank >= 0 and peer >= 0:
                    edges[rank] = peer
        shares.add(edges)
        pause = max(_PAUSE_S, _COST * (time.monotonic() - begin))
        time.sleep(max(0.0, min(pause, left)))
    return shares


def _awaited(group: Group, own: dict) -> int:
    if own["waiting_peer"] >= 0 and not own["arrived"]:
        return group.members[own["waiting_peer"]]
    if own["message_way"] and own["message_peer"] >= 0:
        return group.members[own["message_peer"]]
    return -1

"""Ranks that reach each other by messages: what each shows of itself, as if it were one memory.

Such a rank keeps a *board* in shared memory of its own (csrc/memory/board.h), and one more with
what its system knows of its connections. Of a job on several hosts, those of this host are seen.
"""

from __future__ import annotations

from typing import Any

from pycoll import _C

ELSEWHERE = -1  # the phase of a rank whose board is not on this host
_UNSEEN: dict[str, Any] = {
    "phase": ELSEWHERE,
    "pid": 0,
    "starttime": 0,
    "over": False,
    "call_seq": 0,
    "waiting_peer": -1,
    "waiting_step": 0,
    "arrived": False,
    "waiting_s": 0.0,
    "message_way": 0,
    "message_peer": -1,
    "message_tag": 0,
    "message_s": 0.0,
    "queued": 0,
    "text": "",
    "calls": [],
}


class Boards:
    """The boards of one communicator; it has what `_C.Sight` has."""

    failure = None  # ranks tell each other by messages

    def __init__(self, cookie: int, world_size: int) -> None:
        """Begin without any."""
        self.cookie = cookie
        self.world_size = world_size
        self.boards: dict[int, _C.BoardSight] = {}

    def rank(self, rank: int, calls: int = 1) -> dict[str, Any]:
        """Return what a rank shows; see `RankSight` of csrc/memory/sight.h."""
        board = self.boards.get(rank)
        return board.look(calls) if board is not None else _UNSEEN | {"rank": rank}

    @property
    def inside(self) -> set[int]:
        """Cookies of the memory in which calls of this communicator run inside a host."""
        return {board.inside for board in self.boards.values()} - {0}


def gather(boards: list[_C.BoardSight]) -> list[Boards]:
    """Put the boards of each communicator together."""
    found: dict[int, Boards] = {}
    for board in boards:
        if board.cookie:
            own = found.setdefault(board.cookie, Boards(board.cookie, board.world_size))
            own.boards[board.rank] = board
    return list(found.values())

"""Who moves what when: the transfers of a schedule, for pictures, and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pycoll.schedule.cost.cost import active, cost
from pycoll.schedule.ir import Buffer, Piece, Schedule


@dataclass(frozen=True)
class Arrow:
    """One transfer of a picture.

    Attributes:
        round: Round in which it happens.
        src, dst: Rank whose memory it leaves, and rank whose memory it reaches.
        chunk, count: First chunk, and number of consecutive chunks.
        stored: The owner stores it on another rank; otherwise the owner reads it.
    """

    round: int
    src: int
    dst: int
    chunk: int
    count: int
    stored: bool


@dataclass(frozen=True)
class Mark:
    """A rank at work in a round.

    Attributes:
        round, rank: Where.
        reduces: It combines several sources; otherwise it copies.
    """

    round: int
    rank: int
    reduces: bool

    @property
    def does(self) -> str:
        """What it does, in a word."""
        return "reduces" if self.reduces else "copies"


def transfers(schedule: Schedule) -> Iterator[Arrow | Mark]:
    """Yield everything there is to draw, round by round."""
    n = schedule.n
    held: dict[tuple[int, int], int] = {}  # (rank, slot): chunk that a scratch slot holds
    for number, folds in enumerate(schedule.rounds(schedule.all_ranks())):
        stored: dict[tuple[int, int], int] = {}
        for f in folds:
            count = active(f, n)
            for owner in np.flatnonzero(count).tolist():
                places = [_place(piece, owner, n) for piece in f.pieces]
                chunk = _chunk(places, held) % max(1, schedule.chunks)
                many = int(count[owner])
                yield Mark(number, owner, len(f.srcs) > 1)
                for i, (peer, buffer, slot) in enumerate(places):
                    is_store = i >= len(f.srcs)
                    if is_store and buffer == Buffer.TMP:
                        stored |= {(peer, slot + j): chunk + j for j in range(many)}
                    if peer != owner:
                        src, dst = (owner, peer) if is_store else (peer, owner)
                        yield Arrow(number, src, dst, chunk, many, is_store)
        held |= stored


def _place(piece: Piece, owner: int, n: int) -> tuple[int, Buffer, int]:
    """Return rank, buffer and chunk of a piece of one owner's fold."""
    rank, chunk = (
        int(value[owner]) if np.ndim(value) else int(value) for value in (piece.rank, piece.chunk)
    )
    return rank % n, piece.buffer, chunk


def _chunk(places: list[tuple[int, Buffer, int]], held: dict[tuple[int, int], int]) -> int:
    """Chunk that a fold is about: of the user's arrays, or what a slot that it reads holds."""
    for _, buffer, chunk in reversed(places):
        if buffer != Buffer.TMP:
            return chunk
    return next((held[r, slot] for r, _, slot in places if (r, slot) in held), 0)


def caption(schedule: Schedule) -> tuple[str, str]:
    """Return the title of a picture and the line of figures under it."""
    spent = cost(schedule)
    order = schedule.algorithm.order
    extra = "".join(f", {k} = {v}" for k, v in schedule.params.items())
    title = f"{schedule.collective} · {schedule.algorithm.name} · n = {schedule.n}{extra}"
    figures = [
        _plural(spent.rounds, "round"),
        _plural(schedule.chunks, "chunk"),
        f"{_share(spent.per_rank)} per rank",
        f"order {order}" if order else "nothing is reduced",
    ]
    return title, "   |   ".join(figures)


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _share(part: Fraction) -> str:
    return f"{part} of the vector" if part.denominator > 1 else f"{part} x the vector"


def as_text(schedule: Schedule) -> Iterator[str]:
    """Yield the rounds as lines of text, one transfer a line."""
    yield from caption(schedule)
    current = -1
    for item in transfers(schedule):
        if item.round != current:
            current = item.round
            yield f"round {current}"
        if isinstance(item, Mark):
            yield f"  rank {item.rank} {item.does}"
            continue
        span = f"chunk {item.chunk}" if item.count == 1 else f"chunks {item.chunk}+{item.count}"
        verb = "stores to" if item.stored else "reads from"
        peer = item.dst if item.stored else item.src
        yield f"    {verb} rank {peer}  {span}"

"""Who moves what when: the transfers of a schedule, for pictures, and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pycoll.schedule.cost import active, cost
from pycoll.schedule.ir import Buffer, Fold, Schedule, Vector


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


def transfers(schedule: Schedule) -> Iterator[Arrow | Mark]:
    """Yield everything there is to draw, round by round."""
    n = schedule.n
    ranks = schedule.all_ranks()
    for number, folds in enumerate(schedule.rounds(ranks)):
        for f in folds:
            count = active(f, n)
            for owner in np.flatnonzero(count).tolist():
                yield Mark(number, owner, len(f.srcs) > 1)
                yield from _arrows(f, number, owner, int(count[owner]), schedule)


def _arrows(f: Fold, number: int, owner: int, count: int, schedule: Schedule) -> Iterator[Arrow]:
    chunk = _destination_chunk(f, owner, schedule)
    for i, piece in enumerate((*f.srcs, *f.dsts)):
        peer = _entry(piece.rank, owner) % schedule.n
        if peer == owner:
            continue
        stored = i >= len(f.srcs)
        src, dst = (owner, peer) if stored else (peer, owner)
        yield Arrow(number, src, dst, chunk, count, stored)


def _entry(value: Vector, owner: int) -> int:
    return int(value[owner]) if np.ndim(value) else int(value)


def _destination_chunk(f: Fold, owner: int, schedule: Schedule) -> int:
    """Chunk of the user's array that a fold is about; scratch slots have no colour of their own."""
    for piece in (*f.dsts, *f.srcs):
        if piece.buffer != Buffer.TMP:
            return _entry(piece.chunk, owner) % max(1, schedule.chunks)
    return 0


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


def as_text(schedule: Schedule) -> str:
    """Return the rounds as text, one transfer a line."""
    lines = list(caption(schedule))
    current = -1
    for item in transfers(schedule):
        if item.round != current:
            current = item.round
            lines.append(f"round {current}")
        if isinstance(item, Mark):
            lines.append(f"  rank {item.rank} {'reduces' if item.reduces else 'copies'}")
            continue
        span = f"chunk {item.chunk}" if item.count == 1 else f"chunks {item.chunk}+{item.count}"
        verb = "stores to" if item.stored else "reads from"
        peer = item.dst if item.stored else item.src
        lines.append(f"    {verb} rank {peer}  {span}")
    return "\n".join(lines)

"""Copies that stay on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule.ir import IN, OUT, Fold, Vector, at, fold


def keep(rank: Vector, chunk: Vector = 0, *, count: int = 1, where: Vector = True) -> Fold:
    """Copy a rank's own input to the same place of its output; in place, nothing moves.

    So it waits for no peer, even if peers read that input: it does not change.
    """
    return fold(at(rank, IN, chunk), to=at(rank, OUT, chunk), count=count, where=where)


def alone(rank: Vector, n: int, chunks: int = 1) -> Iterator[Fold]:
    """Yield the one copy that is all of a reduction in a world of one rank, else nothing."""
    if n == 1:
        yield keep(rank, count=chunks)

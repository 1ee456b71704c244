"""Simulate a schedule on tens of thousands of ranks, a round at a time, without listing its steps.

The model is max-plus. A transfer starts when both its ends are through with the rounds before, and
takes ``alpha`` plus the time that the busier of the two ports needs; a port carries everything its
rank sends (or receives) in the round, one byte after the other. A fold ends when its last transfer
does, plus the time to fold. What is stored on another rank arrives there one more transfer later.

Where every rank does what rank 0 does, moved by its number, and all enter at the same time, all are
through with a round at the same time: then one rank stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.cost import Traffic, active, peers_of
from pycoll.schedule.ir import Fold, Schedule
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.table import spans


@dataclass(frozen=True)
class Link:
    """What connects two ranks; the defaults are those of a fast network."""

    alpha: float = 2.0e-6  # seconds from one rank to another, for any size
    beta: float = 1 / 25e9  # seconds per byte
    gamma: float = 1 / 50e9  # seconds per byte folded


def simulate(
    schedule: Schedule,
    nbytes: float,
    link: Link | None = None,
    *,
    start: np.ndarray | None = None,
    noise: Callable[[int], np.ndarray] | None = None,
) -> np.ndarray:
    """Return when each rank has finished, in seconds.

    Args:
        schedule: What runs; 65,536 ranks are fine.
        nbytes: Size of the full vector.
        link: Costs of a transfer, the same between any two ranks.
        start: ``[n]`` time at which each rank enters; a straggler enters late. By default 0.
        noise: Called with the number of each round; returns ``[n]`` seconds, which each rank that
            takes part loses in it.

    Returns:
        ``[n]`` finish times.

    Raises:
        ArgumentError: If ``start`` does not have one entry per rank.
    """
    n = schedule.n
    time = np.zeros(n) if start is None else np.array(start, float)
    if time.shape != (n,):
        raise ArgumentError(f"start has shape {time.shape}; {schedule} needs ({n},)")
    lines = schedule.relative
    if noise is None and lines is not None and lines.moves.all() and time.min() == time.max():
        return time + _alike(lines, n, nbytes / max(1, schedule.chunks), link or Link())
    world = _World(schedule, nbytes, link or Link())
    for number, folds in enumerate(schedule.rounds(world.ranks)):
        time = world.advance(time, folds, None if noise is None else noise(number))
    return time


def _alike(lines: RelativeLines, n: int, chunk_bytes: float, link: Link) -> float:
    """Return the time of a relative schedule without a piece that stays at one rank."""
    rounds = int(lines.round.max(initial=-1)) + 1
    line, place = spans(lines.nsrc + lines.ndst)
    away, source = lines.away(n), place < lines.nsrc[line]
    fetches, stores = (
        np.bincount(line[away & way], minlength=len(lines.nsrc)) > 0 for way in (source, ~source)
    )
    through_port = np.bincount(lines.round[line[away]], lines.count[line[away]], rounds)
    transfer = (through_port > 0) * (link.alpha + link.beta * chunk_bytes * through_port)
    own = fetches.astype(int) + stores
    taken = own * transfer[lines.round] + link.gamma * chunk_bytes * lines.count * (lines.nsrc - 1)
    longest = transfer.copy()
    happens = lines.count > 0
    np.maximum.at(longest, lines.round[happens], taken[happens])
    return float(longest.sum())


class _World:
    """Constants of a simulation, and the step from one round to the next."""

    def __init__(self, schedule: Schedule, nbytes: float, link: Link) -> None:
        self.ranks, self.alpha = schedule.all_ranks(), link.alpha
        chunk_bytes = nbytes / max(1, schedule.chunks)
        self.per_chunk = link.beta * chunk_bytes
        self.fold_per_chunk = link.gamma * chunk_bytes

    def advance(
        self, before: np.ndarray, folds: list[Fold], noise: np.ndarray | None
    ) -> np.ndarray:
        """Return the times after a round of concurrent folds."""
        moved = Traffic(folds, self.ranks)
        sent, received = moved.sent, moved.received
        after = before + (sent > 0) * (self.alpha + self.per_chunk * sent)
        own, arrive = [], []
        for f in folds:
            count = active(f, len(self.ranks))
            busy, ready, targets = count > 0, before, []
            for stores, peer in peers_of(f, self.ranks):
                away = peer != self.ranks
                ports = (sent, received[peer]) if stores else (sent[peer], received)
                transfer = self.alpha + self.per_chunk * np.maximum(*ports)
                if stores:
                    targets.append((busy & away, peer, transfer))
                else:
                    ready = np.maximum(ready, np.maximum(before, before[peer]) + away * transfer)
            done = ready + self.fold_per_chunk * (len(f.srcs) - 1) * count
            done = done if noise is None else done + noise
            own.append((busy, done))
            for away, peer, transfer in targets:
                arrive.append((away, peer, np.maximum(done, before[peer]) + transfer))
        for busy, done in own:
            np.maximum(after, done, out=after, where=busy)
        for busy, dst, when in arrive:
            np.maximum.at(after, dst[busy], when[busy])
        return after

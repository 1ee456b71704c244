"""Simulate a schedule on tens of thousands of ranks, a round at a time, without listing its steps.

The model is max-plus. A transfer starts when both its ends are through with the rounds before, and
takes ``alpha`` plus the time that the busier of the two ports needs; a port carries everything its
rank sends (or receives) in the round, one byte after the other. A fold ends when its last transfer
does, plus the time to fold. What is stored on another rank arrives there one more transfer later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.ir import Fold, Schedule, Vector


@dataclass(frozen=True)
class Link:
    """What connects two ranks; the defaults are those of a fast network.

    Attributes:
        alpha: Seconds from one rank to another, for any size.
        beta: Seconds per byte.
        gamma: Seconds per byte folded.
    """

    alpha: float = 2.0e-6
    beta: float = 1 / 25e9
    gamma: float = 1 / 50e9


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
    world = _World(schedule, nbytes, link or Link())
    for number, folds in enumerate(schedule.rounds(world.ranks)):
        time = world.advance(time, folds, None if noise is None else noise(number))
    return time


class _World:
    """Constants of a simulation, and the step from one round to the next."""

    def __init__(self, schedule: Schedule, nbytes: float, link: Link) -> None:
        self.n = schedule.n
        self.ranks = schedule.all_ranks()
        chunk_bytes = nbytes / max(1, schedule.chunks)
        self.alpha = link.alpha
        self.per_chunk = link.beta * chunk_bytes
        self.fold_per_chunk = link.gamma * chunk_bytes

    def advance(
        self, before: np.ndarray, folds: list[Fold], noise: np.ndarray | None
    ) -> np.ndarray:
        """Return the times after a round of concurrent folds."""
        moves = [self._moves(f) for f in folds]
        sent, received = self._ports(moves)
        after = before + (sent > 0) * (self.alpha + self.per_chunk * sent)
        own, arrive = [], []
        for f, (busy, count, sources, targets) in zip(folds, moves, strict=True):
            ready = before
            for peer, away in sources:
                transfer = self.alpha + self.per_chunk * np.maximum(sent[peer], received)
                ready = np.maximum(ready, np.maximum(before, before[peer]) + away * transfer)
            done = ready + self.fold_per_chunk * (len(f.srcs) - 1) * count
            if noise is not None:
                done = done + noise
            own.append((busy, done))
            for peer, away in targets:
                transfer = self.alpha + self.per_chunk * np.maximum(sent, received[peer])
                arrive.append((busy & away, peer, np.maximum(done, before[peer]) + transfer))
        for busy, done in own:
            np.maximum(after, done, out=after, where=busy)
        for busy, peer, when in arrive:
            where = np.broadcast_to(peer, (self.n,))[busy]
            np.maximum.at(after, where, when[busy])
        return after

    def _moves(self, f: Fold) -> tuple:
        """Return who takes part, chunk counts, and (peer, whether it is remote) of each operand."""
        busy = np.broadcast_to(np.logical_and(f.where, np.asarray(f.count) > 0), (self.n,))
        sources = [self._peer(piece.rank) for piece in f.srcs if piece.rank is not self.ranks]
        targets = [self._peer(piece.rank) for piece in f.dsts if piece.rank is not self.ranks]
        return busy, f.count, sources, targets

    def _peer(self, rank: Vector) -> tuple[Vector, np.ndarray]:
        peer = rank % self.n
        return peer, peer != self.ranks

    def _ports(self, moves: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
        """Count the chunks that leave and reach each rank in the round."""
        sent, received = np.zeros(self.n), np.zeros(self.n)
        for busy, count, sources, targets in moves:
            active = busy * count
            for operands, here, there in ((sources, received, sent), (targets, sent, received)):
                for peer, away in operands:
                    amount = active * away
                    here += amount
                    if np.ndim(peer):
                        there += np.bincount(peer, amount, self.n)
                    else:
                        there[peer] += amount.sum()
        return sent, received

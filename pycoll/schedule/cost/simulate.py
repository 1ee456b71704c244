"""Simulate a schedule on tens of thousands of ranks, a round at a time, without listing its steps.

The model is max-plus. A transfer starts when both its ends are through with the rounds before, and
takes the latency of its way plus the time that the busiest link on it needs; a link carries all
bytes of the round, one after the other. Each further message of a rank in a round costs a gap. A
fold ends when its last transfer does, plus the time to fold. What is stored on another rank arrives
there one more transfer later: behind a fold of what came from elsewhere, links carry what is stored
by themselves, since all else has arrived by then.

Three things make it fast. Where every rank does what rank 0 does, moved by its number, and all are
alike and enter at the same time, one rank stands for all. Where a round is followed by many like
it, as in a ring, only ranks off the common pace are looked at. All other rounds are a few
operations on vectors of all ranks.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.cost import active, peers_of
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.pace import advance_alike
from pycoll.schedule.ir import Fold, Schedule
from pycoll.schedule.language.pieces import Buffer, Piece
from pycoll.schedule.language.relative import RelativeLines
from pycoll.schedule.lowering.table import spans

Some = np.ndarray | slice  # of the ranks
MOST_MESSAGES = 1 << 26
"""Messages that a round may have between ranks that are not all alike."""


@dataclass(frozen=True)
class Link:
    """What connects any two ranks, as a switch does; the defaults are those of a fast network."""

    alpha: float = 2.0e-6  # seconds from one rank to another, for any size
    beta: float = 1 / 25e9  # seconds per byte
    gamma: float = 1 / 50e9  # seconds per byte folded

    def joining(self, n: int) -> Fabric:
        """Return the switch that joins n ranks so."""
        return Fabric(n, bw=1 / self.beta, latency=self.alpha, gap=0.0, fold=1 / self.gamma)


@dataclass
class Loads:
    """What links carried.

    Attributes:
        rounds: For each kind of round, in order: how often it came one after the other, and the
            seconds that each link was busy in one of them, ``[links + 1]``; the last is no link.
        busy: Seconds that each link was busy in all, ``[links + 1]``.
    """

    rounds: list[tuple[int, np.ndarray]] = field(default_factory=list)
    busy: np.ndarray | float = 0.0

    def add(self, times: int, busy: np.ndarray) -> None:
        """Count one kind of round."""
        self.rounds.append((times, busy))
        self.busy = self.busy + times * busy


def simulate(
    schedule: Schedule,
    nbytes: float,
    link: Link | Fabric | None = None,
    *,
    start: np.ndarray | None = None,
    noise: Callable[[int], np.ndarray] | None = None,
    loads: Loads | None = None,
    most_s: float = math.inf,
) -> np.ndarray:
    """Return when each rank has finished, in seconds.

    Args:
        schedule: What runs; 65,536 ranks are fine.
        nbytes: Size of the full vector.
        link: What joins the ranks: the same for any two, or a network.
        start: ``[n]`` time at which each rank enters; a straggler enters late, one that is dead at
            infinity. By default 0.
        noise: Called with the number of each round; returns ``[n]`` seconds, which each rank that
            takes part loses in it.
        loads: Is told what links carry.
        most_s: Seconds that the simulation itself may take.

    Returns:
        ``[n]`` finish times; infinity for ranks that wait for ever.

    Raises:
        ArgumentError: If ``start`` does not have one entry per rank, if the network has another
            size, if a round has too many messages to simulate, or if it takes longer than it may.
    """
    time, fabric = _checked(schedule, link, start)
    lines = schedule.relative
    alike = type(fabric) is Fabric and not fabric.speeds and noise is None and loads is None
    if alike and lines is not None and lines.moves.all() and time.min() == time.max():
        return time + _alike(lines, schedule.n, nbytes / max(1, schedule.chunks), fabric)
    world, number = World(schedule, nbytes, fabric), 0
    until = clock.monotonic() + most_s
    for times, folds in _each_kind(schedule, world.ranks):
        if clock.monotonic() > until:
            raise ArgumentError(f"{schedule} takes more than {most_s:g} s to simulate")
        step = world.round(folds)
        if loads is not None:
            loads.add(times, step.busy)
        if noise is None:
            time = advance_alike(step, time, times)
            continue
        for _ in range(times):
            time = step.advance(time, noise(number))
            number += 1
    return time


def _checked(
    schedule: Schedule, link: Link | Fabric | None, start: np.ndarray | None
) -> tuple[np.ndarray, Fabric]:
    """Return when ranks enter, and what joins them; refuse those of another world."""
    n = schedule.n
    time = np.zeros(n) if start is None else np.array(start, float)
    if time.shape != (n,):
        raise ArgumentError(f"start has shape {time.shape}; {schedule} needs ({n},)")
    fabric = link if isinstance(link, Fabric) else (link or Link()).joining(n)
    if fabric.n != n:
        raise ArgumentError(f"the network joins {fabric.n} ranks; {schedule} has {n}")
    return time, fabric


def _alike(lines: RelativeLines, n: int, chunk_bytes: float, link: Fabric) -> float:
    """Return the time of a relative schedule without a piece that stays at one rank."""
    rounds = int(lines.round.max(initial=-1)) + 1
    line, place = spans(lines.nsrc + lines.ndst)
    away, source = lines.away(n), place < lines.nsrc[line]
    fetches, stores = (
        np.bincount(line[away & way], minlength=len(lines.nsrc)) > 0 for way in (source, ~source)
    )
    later = away & ~source & fetches[line]  # stored behind a fold
    transfer = np.zeros((2, rounds))
    for phase, part in enumerate((away & ~later, later)):
        through_port = np.bincount(lines.round[line[part]], lines.count[line[part]], rounds)
        transfer[phase] = (through_port > 0) * (link.latency + chunk_bytes / link.bw * through_port)
    folded = chunk_bytes / link.fold * lines.count * (lines.nsrc - 1)
    first, second = transfer[:, lines.round]
    taken = np.where(fetches | stores, first, 0) + np.where(fetches & stores, second, 0) + folded
    longest = transfer.sum(axis=0)
    happens = lines.count > 0
    np.maximum.at(longest, lines.round[happens], taken[happens])
    return float(longest.sum())


# --- Rounds ---------------------------------------------------------------------------------------


def _each_kind(schedule: Schedule, ranks: np.ndarray) -> Iterator[tuple[int, list[Fold]]]:
    """Yield each run of rounds whose messages are the same: how many, and the folds of one."""
    lines = schedule.relative
    if lines is None:
        for folds in schedule.rounds(ranks):
            _check_messages(schedule, sum(len(f.pieces) for f in folds))
            yield 1, folds
        return
    first = np.append(0, np.cumsum(lines.nsrc + lines.ndst))
    ends = np.searchsorted(lines.round, np.arange(int(lines.round.max(initial=-1)) + 2))

    def form(number: int) -> tuple[bytes, ...]:
        own = slice(ends[number], ends[number + 1])
        pieces = slice(first[own.start], first[own.stop])
        columns = (lines.nsrc[own], lines.ndst[own], lines.count[own])
        return *(c.tobytes() for c in columns), *(
            c[pieces].tobytes() for c in (lines.rank, lines.moves)
        )

    for _, group in groupby(range(len(ends) - 1), form):
        numbers = list(group)
        own = range(ends[numbers[0]], ends[numbers[0] + 1])
        _check_messages(schedule, int(first[own.stop] - first[own.start]))
        yield len(numbers), [_fold_of(lines, line, int(first[line]), ranks) for line in own]


def _check_messages(schedule: Schedule, pieces: int) -> None:
    if pieces * schedule.n > MOST_MESSAGES:
        raise ArgumentError(
            f"{schedule} has up to {pieces * schedule.n:,} messages in a round; at most "
            f"{MOST_MESSAGES:,} are simulated where ranks are not all alike"
        )


def _fold_of(lines: RelativeLines, line: int, first: int, ranks: np.ndarray) -> Fold:
    """Return a line as a fold of all ranks; only who and how much is right."""
    size = int(lines.nsrc[line])
    pieces = tuple(
        Piece(ranks + lines.rank[i] if lines.moves[i] else int(lines.rank[i]), Buffer.IN, 0)
        for i in range(first, first + size + int(lines.ndst[line]))
    )
    pieces = tuple(Piece(ranks, p.buffer, 0) if _own(p, ranks) else p for p in pieces)
    return Fold(pieces[:size], pieces[size:], int(lines.count[line]), True, False)


def _own(piece: Piece, ranks: np.ndarray) -> bool:
    """Whether a piece is its owner's on every rank."""
    return np.ndim(piece.rank) == 1 and bool(piece.rank[0] % len(ranks) == 0)


class _Move(NamedTuple):
    """A piece of a fold that lies on another rank, for some or all of those who take part."""

    stores: bool  # whether the owner stores it; else it reads
    phase: int  # 1: it is stored behind a fold of what came from elsewhere
    who: Some  # those who take part and have it elsewhere
    # peer, takes: ``[who]`` where it lies, and the seconds of the transfer
    peer: np.ndarray
    takes: np.ndarray


class _Part(NamedTuple):
    """A fold of a round."""

    who: Some  # those who take part
    folding: np.ndarray | float  # seconds to combine, of all ranks
    moves: list[_Move]


def _some(which: np.ndarray) -> Some:
    """Return the ranks of a mask, or the slice of all."""
    return slice(None) if which.all() else np.flatnonzero(which)


def _merged(
    f: Fold, ranks: np.ndarray, part: np.ndarray
) -> list[tuple[bool, np.ndarray, np.ndarray]]:
    """List whether pieces are stored, where they lie, and for whom of a mask that is elsewhere.

    Sources that lie elsewhere for different ranks count as one.
    """
    found: list[tuple[bool, np.ndarray, np.ndarray]] = []
    for stores, peer in peers_of(f, ranks):
        away = part & (peer != ranks)
        if not stores and found and not np.any(found[-1][2] & away):
            _, other, before = found.pop()
            peer, away = np.where(away, peer, other), away | before
        found.append((stores, peer, away))
    return found


class World:
    """The ranks of a simulation, and what joins them."""

    def __init__(self, schedule: Schedule, nbytes: float, fabric: Fabric) -> None:
        """Prepare to make rounds of folds."""
        self.ranks: np.ndarray = schedule.all_ranks()
        self.fabric = fabric
        self.chunk_bytes: float = nbytes / max(1, schedule.chunks)

    def round(self, folds: list[Fold]) -> Round:
        """Find what a round of concurrent folds takes."""
        ranks, fabric = self.ranks, self.fabric
        load = np.zeros((2, fabric.none + 1))  # of stores behind a fold: the second
        # messages sent and received, but one
        more = np.full((2, 2, len(ranks) if fabric.gap else 1), -1)
        parts: list[_Part] = []
        for f in folds:
            count = active(f, len(ranks))
            part = count > 0
            alike = np.ndim(f.count) == 0  # those who take part move as much
            moves, fetched = [], False
            for stores, peer, away in _merged(f, ranks, part):
                who = _some(away)
                phase = int(stores and fetched)
                mine, there = ranks[who], peer[who]
                if len(mine):
                    size = float(f.count) if alike else count[who]
                    ends = (mine, there) if stores else (there, mine)
                    fabric.load(load[phase], *ends, size * self.chunk_bytes)
                    moves.append(_Move(stores, phase, who, there, np.zeros(0)))
                    fetched = fetched or not stores
                    if fabric.gap:
                        more[phase] += [np.bincount(each, minlength=len(ranks)) for each in ends]
            folding = (len(f.srcs) - 1) * self.chunk_bytes / fabric.fold
            parts.append(_Part(_some(part), folding * (f.count if alike else count), moves))
        busy = np.array([fabric.busy(each) for each in load])
        more = fabric.gap * np.maximum(more, 0)
        for part in parts:
            for i, move in enumerate(part.moves):
                mine = ranks[move.who]
                ends = (mine, move.peer) if move.stores else (move.peer, mine)
                takes = fabric.delay(*ends) + fabric.slowest(busy[move.phase], *ends)
                if fabric.gap:
                    sent, got = more[move.phase]
                    takes = takes + np.maximum(sent[ends[0]], got[ends[1]])
                part.moves[i] = move._replace(takes=takes)
        leaving = np.array([fabric.leaving(each) for each in busy])
        leaves = (leaving > 0) * fabric.latency + leaving + more[:, 0]
        return Round(parts, busy.sum(axis=0), leaves.sum(axis=0))


class Round:
    """Concurrent folds, and what each of them takes."""

    def __init__(self, parts: list[_Part], busy: np.ndarray, leaves: np.ndarray) -> None:
        """Take the folds, the seconds that each link is busy, and those that each rank sends."""
        self.parts = parts
        self.busy = busy
        self.leaves = leaves

    def advance(self, before: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the times of all ranks after it."""
        after = before + self.leaves
        arrive = []
        for who, folding, moves in self.parts:
            done = before + (folding + noise)
            for move in moves:
                if not move.stores:
                    ready = np.maximum(before[move.who], before[move.peer]) + move.takes
                    lost = folding + noise
                    lost = lost[move.who] if np.ndim(lost) else lost
                    done[move.who] = np.maximum(done[move.who], ready + lost)
            after[who] = np.maximum(after[who], done[who])
            for move in moves:
                if move.stores:
                    when = np.maximum(done[move.who], before[move.peer]) + move.takes
                    arrive.append((move.peer, when))
        for peer, when in arrive:
            np.maximum.at(after, peer, when)
        return after

    def heard(self) -> list[np.ndarray] | None:
        """Return who reads from each rank, for each move; None where that is not one and all."""
        found = []
        ranks = np.arange(len(self.leaves))
        for move in (move for part in self.parts for move in part.moves):
            readers = np.zeros_like(ranks)
            if move.stores or not isinstance(move.who, slice):
                return None
            readers[move.peer] = ranks
            if np.any(readers[move.peer] != ranks):
                return None
            found.append(readers)
        return found

    def some(self, before: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return the times of some ranks after it, where `heard` returns anything."""
        mine = before[ranks]
        after = mine + self.leaves[ranks]
        for _, folding, moves in self.parts:
            ready = mine
            for move in moves:
                arrived = np.maximum(mine, before[move.peer[ranks]]) + move.takes[ranks]
                ready = np.maximum(ready, arrived)
            after = np.maximum(after, ready + folding)
        return after

"""What a schedule costs: counts, exact fractions of the vector, and a prediction in seconds.

Everything is counted on the vector form of the schedule, for all ranks at once; nothing is taken
from a formula. `pycoll.schedule.language.formula` reads what an algorithm's docstring states, and
tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Fold, Piece, Schedule
from pycoll.schedule.lowering.stage import SlotMap
from pycoll.schedule.lowering.table import spans


def busbw_factor(collective: str, n: int) -> float:
    """Return what turns algorithm bandwidth into bus bandwidth, as nccl-tests define it.

    With S the size of the full vector in bytes and t the time of a call, algbw = S / t and
    busbw = algbw * factor, which is comparable between world sizes.

    Raises:
        ScheduleError: For a collective that moves no data or is not known.
    """
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "broadcast": 1.0,
        "reduce": 1.0,
        "scan": 1.0,
        "exscan": 1.0,
        **dict.fromkeys(
            ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"), (n - 1) / n
        ),
    }
    if collective not in factors:
        raise ScheduleError(f"no bus bandwidth for {collective!r}; known: {', '.join(factors)}")
    return factors[collective]


@dataclass(frozen=True)
class Machine:
    """A host with shared memory; the defaults are rounded figures of a current server core."""

    # seconds from a rank's store of a flag to a waiting peer's load: one synchronisation
    alpha: float = 1.5e-7
    sigma: float = 5.0e-8  # seconds to look at the flag of each peer that a rank waits for
    beta: float = 1.5e-11  # seconds per byte that a rank loads or stores
    gamma: float = 5.0e-12  # seconds per byte that a rank folds into another
    # seconds per byte that all ranks together load or store: the memory they share
    bus: float = 4.0e-12
    call: float = 5.0e-7  # seconds of a call that moves nothing
    cell_bytes: int = 512 << 10  # staging memory of a rank; a staged call runs in segments that fit

    def predict(self, schedule: Schedule, nbytes: int, direct: bool) -> float:
        """Predict the time of a call on memory that all ranks share, one of many in a row.

        A round lasts as long as its busiest rank, which waits for peers, loads, stores and folds;
        or as long as the shared memory needs for the bytes of all ranks together. Staged, a rank
        may be one iteration ahead of others, so its copies overlap with their rounds: an iteration
        lasts as long as the rounds, or as the rank that has most to do in all, copies included.

        Args:
            schedule: What runs.
            nbytes: Size of the full vector.
            direct: Peers access the users' arrays; otherwise copies to and from staging buffers
                are added.

        Returns:
            Seconds.
        """
        chunk_bytes = nbytes / max(1, schedule.chunks)
        moved, own = np.zeros(schedule.n), np.zeros(schedule.n)
        moving, syncing, widest = 0.0, 0.0, 0.0
        for t in traffic(schedule):
            bytes_moved = (t.loaded + t.stored) * chunk_bytes
            alone = self.beta * bytes_moved + self.gamma * t.reduced * chunk_bytes
            moving += max(float(alone.max()), self.bus * float(bytes_moved.sum()))
            moved, own = moved + bytes_moved, own + alone
            peers = int(t.waits.max())
            wait = self.alpha + self.sigma * peers if peers else 0.0
            syncing, widest = syncing + wait, max(widest, wait)
        if direct:
            return self.call + moving + syncing + widest
        copies = staging(schedule)
        copied = (2 * copies.copied_in + 2 * copies.copied_out + copies.twice) * chunk_bytes
        busiest = float((own + self.beta * copied).max())
        moving = max(moving, busiest, self.bus * float((moved + copied).sum()))
        syncing += widest if copies.copied_out.any() else 0.0
        slots = SlotMap(schedule).slots if schedule.n > 1 else 0
        segments = max(1, math.ceil(slots * chunk_bytes / self.cell_bytes))
        return self.call + moving + syncing * segments


class Volume(NamedTuple):
    """An amount of data as fractions of the full vector: of the busiest rank, and of all ranks."""

    most: Fraction
    total: Fraction


@dataclass(frozen=True)
class Cost:
    """Counts of one schedule."""

    rounds: int  # rounds in which data goes from one rank to another
    lines: int  # folds of the schedule, counted over all its rounds
    # sent, received: data that leaves and reaches a rank, whichever rank moves it
    sent: Volume
    received: Volume
    # loaded, stored: data that a rank loads and stores as the owner of folds, its own included
    loaded: Volume
    stored: Volume
    reduced: Volume  # data that a rank folds into other data
    critical: Fraction  # sum over rounds of what the busiest rank sends or receives

    @property
    def per_rank(self) -> Fraction:
        """What the busiest rank sends or receives, whichever is more."""
        return max(self.sent.most, self.received.most)


class Traffic:
    """Chunks that each rank moves in one round, as ``[n]`` integer arrays."""

    sent: np.ndarray
    received: np.ndarray
    loaded: np.ndarray
    stored: np.ndarray
    reduced: np.ndarray
    waits: np.ndarray  # an estimate of how many peers a rank has to hear of

    def __init__(self, folds: list[Fold], ranks: np.ndarray) -> None:
        """Count the folds of a round, made for the vector of all ranks."""
        n = len(ranks)
        self.sent, self.received, self.loaded, self.stored, self.reduced, self.waits = (
            np.zeros(n, np.int64) for _ in range(6)
        )
        for f in folds:
            count = active(f, n)
            self.loaded += len(f.srcs) * count
            self.stored += len(f.dsts) * count
            self.reduced += (len(f.srcs) - 1) * count
            peers = np.zeros((2, n), np.int64)  # whose memory is read, and whose is written
            for stores, peer in peers_of(f, ranks):
                moved = np.where(peer != ranks, count, 0)
                there = np.bincount(peer, moved, n).astype(np.int64)
                self.sent += moved if stores else there
                self.received += there if stores else moved
                peers[int(stores)] += moved > 0
            self.waits += peers.max(axis=0)


def active(f: Fold, n: int) -> np.ndarray:
    """Number of chunks that each rank handles in a fold, 0 where it takes no part."""
    return np.broadcast_to(np.where(f.where, f.count, 0), (n,))


def peers_of(f: Fold, ranks: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Yield, for pieces that may be remote, whether the owners store them, and where they lie."""
    for i, piece in enumerate(f.pieces):
        if piece.rank is not ranks:
            rank = np.asarray(piece.rank)
            if rank.min() < 0 or rank.max() >= len(ranks):  # a look is faster than a division
                rank = rank % len(ranks)
            yield i >= len(f.srcs), np.broadcast_to(rank, ranks.shape)


def traffic(schedule: Schedule) -> Iterator[Traffic]:
    """Yield what moves in each round."""
    ranks = schedule.all_ranks()
    for folds in schedule.rounds(ranks):
        yield Traffic(folds, ranks)


def cost(schedule: Schedule) -> Cost:
    """Count a schedule."""
    names = ("sent", "received", "loaded", "stored", "reduced")
    sums = {name: np.zeros(schedule.n, np.int64) for name in names}
    rounds, lines, critical = 0, 0, 0
    everyone = schedule.all_ranks()
    for folds in schedule.rounds(everyone):
        moved = Traffic(folds, everyone)
        lines += len(folds)
        rounds += bool(moved.sent.any())
        critical += int(np.maximum(moved.sent, moved.received).max())
        for name in names:
            sums[name] += getattr(moved, name)
    unit = Fraction(1, max(1, schedule.chunks))
    volumes = {k: Volume(int(v.max()) * unit, int(v.sum()) * unit) for k, v in sums.items()}
    return Cost(rounds=rounds, lines=lines, critical=critical * unit, **volumes)


class Staging(NamedTuple):
    """Chunks that each rank copies because peers cannot reach its arrays, as ``[n]`` arrays.

    A copy loads and stores once. ``twice`` counts only stores: of results, to staging buffers too.
    """

    copied_in: np.ndarray
    copied_out: np.ndarray
    twice: np.ndarray


def staging(schedule: Schedule) -> Staging:
    """Count the copies that `pycoll.schedule.lowering.stage` adds, without building its table."""
    n, chunks = schedule.n, max(1, schedule.chunks)
    written, read_in, read_out, by_others = (np.zeros(n * chunks, bool) for _ in range(4))
    own_stores = np.zeros(n * chunks, np.int64)
    for folds in schedule.rounds(schedule.all_ranks()):
        now: list[np.ndarray] = []
        for f in folds:
            owner, offset = spans(active(f, n))
            for i, piece in enumerate(f.pieces):
                if piece.buffer == Buffer.TMP:
                    continue
                cell, own = _cells(piece, owner, offset, n, chunks)
                if i >= len(f.srcs):
                    now.append(cell)
                    by_others[cell[~own]] = True
                    np.add.at(own_stores, cell[own], 1)  # few of many: no array of them all
                    continue
                acc_in = (piece.buffer == Buffer.ACC) & ~written[cell]
                from_in = acc_in | (piece.buffer == Buffer.IN)
                read_in[cell[~own & from_in]] = True
                read_out[cell[~own & ~from_in]] = True
        for cell in now:
            written[cell] = True
    twice = np.where(read_out & ~by_others, own_stores, 0)
    return Staging(*(a.reshape(n, chunks).sum(axis=1) for a in (read_in, by_others, twice)))


def _cells(
    piece: Piece, owner: np.ndarray, offset: np.ndarray, n: int, chunks: int
) -> tuple[np.ndarray, np.ndarray]:
    """List the cells (rank * chunks + chunk) of a piece, and which of them are their reader's."""
    rank, chunk = (v if np.size(v) == 1 else v[owner] for v in (piece.rank, piece.chunk))
    rank = rank % n
    return rank * chunks + (chunk + offset) % chunks, rank == owner

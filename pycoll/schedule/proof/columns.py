"""Checking large worlds that have no symmetry: some chunks, on all ranks, in all rounds.

The schedule itself is run, not its plans, for the vector of all ranks. A value is a sum of random
numbers, one for each input: a contribution that is missing, comes twice or is of another chunk
gives another sum, but for one case in 2^60. A second number stands for the expression that was
folded, so that ranks that differ in the order of operands show.

Where a schedule uses no scratch memory, what is in a chunk's places only ever comes from folds that
name this chunk: so a sample of chunks is run alone. Otherwise all are, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Fold, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.language.promise import check_sizes
from pycoll.schedule.lowering.table import spans

SAMPLE = 16  # chunks
MOST_PIECES = 1 << 26  # that the folds of a round read and write
MOST_CELLS = 1 << 25  # places of all ranks together


@dataclass(frozen=True)
class Checked:
    """What a run of some chunks has found."""

    rounds: int  # number of rounds
    chunks: int  # how many of them were run
    sent: float  # most bytes that leave a rank, as a fraction of the full vector
    roundings: int  # largest number of folds on the way to one of these chunks
    tree: bool  # whether these chunks have the in-order balanced tree


def check_columns(schedule: Schedule, seed: int = 0) -> Checked:
    """Run a schedule on all ranks for all chunks, or for a sample of them.

    Raises:
        ScheduleError: Naming round, rank and piece; or if it is too large to run.
    """
    check_sizes(schedule)
    n, chunks, slots = schedule.n, schedule.chunks, schedule.slots
    chosen = np.arange(chunks)
    if n * (chunks + slots) > MOST_CELLS >> 4 and not slots and chunks > SAMPLE:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(chunks, SAMPLE, replace=False))
    if n * (len(chosen) + slots) > MOST_CELLS:
        raise ScheduleError(
            f"{schedule} has no symmetry, and {n * (len(chosen) + slots):,} places, too many to "
            f"run; at most {MOST_CELLS:,}. Prove a smaller world"
        )
    world = _World(schedule, chosen, seed)
    rounds = 0
    for folds in schedule.rounds(world.ranks):
        if sum(len(f.pieces) for f in folds) * n > MOST_PIECES:
            raise ScheduleError(
                f"{schedule} has no symmetry, and more than {MOST_PIECES:,} pieces in a round. "
                "Prove a smaller world"
            )
        world.advance(rounds, folds)
        rounds += 1
    return Checked(rounds, len(chosen), float(world.sent.max()) / chunks, *world.judge())


class _World:
    """The memory of all ranks, as far as it belongs to the chosen chunks, and scratch memory.

    Cells: the results of rank 0 for the chosen chunks, of rank 1, ..., then the scratch memory.
    Inputs have no cells: they are known.
    """

    def __init__(self, schedule: Schedule, chosen: np.ndarray, seed: int) -> None:
        self.schedule, self.spec = schedule, COLLECTIVES[schedule.collective]
        self.ranks, self.chosen = schedule.all_ranks(), chosen
        self.n, self.chunks, self.width = schedule.n, schedule.chunks, len(chosen)
        self.column = np.full(self.chunks, -1)
        self.column[chosen] = np.arange(self.width)
        size = self.n * (self.width + schedule.slots)
        self.sum, self.form = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        self.folds, self.written = np.zeros(size, np.int32), np.zeros(size, bool)
        self.known = np.zeros(size, bool)  # written, and from chunks that are run
        self.salt = np.random.default_rng(seed + 1).integers(1, 1 << 63, 2, np.uint64)
        self.sent = np.zeros(self.n, np.int64)
        self.share = max(1, self.chunks // self.n)

    def input(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the random number of inputs."""
        return _mixed(_mixed(rank.astype(np.uint64) + self.salt[0]) + chunk.astype(np.uint64))

    def held(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Whether ranks have an input there."""
        found = np.ones(len(rank), bool)
        if self.spec.in_at_root:
            found &= rank == self.schedule.root
        return found & (chunk // self.share == rank) if self.spec.in_layout == OWN else found

    def advance(self, number: int, folds: list[Fold]) -> None:
        """Run a round: all folds read, then all write."""
        writes, touched = [], []
        for line, f in enumerate(folds):
            owner, offset, cells = self._units(f)
            unit = (np.int64(line) << 40) + owner * (self.chunks + 1) + offset
            values = [
                self._value(number, piece, *at) for piece, at in zip(f.srcs, cells, strict=False)
            ]
            result = _folded([each[:4] for each in values], f.tree)
            for piece, at in zip(f.dsts, cells[len(f.srcs) :], strict=True):
                cell = self._cell(piece.buffer, *at[:2])
                real = cell >= 0
                writes.append((cell[real], [column[real] for column in result]))
                touched.append((cell[real], unit[real], True))
            touched += [(each[4][each[4] >= 0], unit[each[4] >= 0], False) for each in values]
        self._check_concurrent(number, touched)
        for cell, (total, form, folded, known) in writes:
            self.sum[cell], self.form[cell] = total, form
            self.folds[cell], self.known[cell], self.written[cell] = folded, known, True

    def _units(self, f: Fold) -> tuple[np.ndarray, np.ndarray, list[tuple]]:
        """Return owner and offset of the single folds to run, and for each piece where it is."""
        count = np.broadcast_to(np.where(f.where, f.count, 0), (self.n,))
        starts = [
            (np.broadcast_to(p.rank, (self.n,)) % self.n, np.broadcast_to(p.chunk, (self.n,)))
            for p in f.pieces
        ]
        self._count_sent(f, count, starts)
        if self.width == self.chunks:
            owner, offset = spans(count)
        else:
            pairs = []
            for piece, (_, chunk) in zip(f.pieces, starts, strict=True):
                if piece.buffer != Buffer.TMP:
                    ahead = (self.chosen[None, :] - chunk[:, None]) % self.chunks
                    who, which = np.nonzero(ahead < count[:, None])
                    pairs.append(who * self.chunks + ahead[who, which])
            owner, offset = np.divmod(np.unique(np.concatenate(pairs)), self.chunks)
        cells = [(rank[owner], chunk[owner] + offset, owner) for rank, chunk in starts]
        return owner, offset, cells

    def _count_sent(self, f: Fold, count: np.ndarray, starts: list[tuple]) -> None:
        for i, (rank, _) in enumerate(starts):
            away = np.where(rank != self.ranks, count, 0)
            self.sent += away if i >= len(f.srcs) else np.bincount(rank, away, self.n).astype(int)

    def _cell(self, buffer: Buffer, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the number of the result or scratch cell, -1 for chunks that are not chosen."""
        if buffer == Buffer.TMP:
            if np.any((chunk < 0) | (chunk >= self.schedule.slots)):
                raise ScheduleError(f"{self.schedule}: a scratch slot is out of range")
            return self.n * self.width + rank * self.schedule.slots + chunk
        column = self.column[chunk % self.chunks]
        return np.where(column >= 0, rank * self.width + column, -1)

    def _value(
        self, number: int, piece: object, rank: np.ndarray, chunk: np.ndarray, owner: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return sum, form, folds and whether it is known, and the result cell that was read."""
        cell = self._cell(piece.buffer, rank, chunk)
        early = np.zeros(len(cell), bool)
        if piece.buffer != Buffer.TMP:
            chunk = chunk % self.chunks
            early |= piece.buffer == Buffer.IN
            early |= (piece.buffer == Buffer.ACC) & ~self.written[np.maximum(cell, 0)]
        here = self.input(rank, chunk)
        known = np.where(early, self.held(rank, chunk), self.known[cell] & (cell >= 0))
        if not known.all() and self.width == self.chunks:
            bad = int(np.flatnonzero(~known)[0])
            raise ScheduleError(
                f"{self.schedule}: round {number}: rank {owner[bad]} reads "
                f"{piece.buffer.name.lower()}[{rank[bad]}:{chunk[bad]}], which nobody has written"
            )
        total = np.where(early, here, self.sum[cell])
        form = np.where(early, _mixed(here + self.salt[1]), self.form[cell])
        folded = np.where(early, 0, self.folds[cell])
        return total, form, folded, known, np.where(early, -1, cell)

    def _check_concurrent(self, number: int, touched: list[tuple]) -> None:
        """Refuse a round in which one fold writes what another one reads or writes."""
        cell = np.concatenate([each[0] for each in touched])
        unit = np.concatenate([each[1] for each in touched])
        write = np.concatenate([np.full(len(each[0]), each[2]) for each in touched])
        if not write.any():
            return
        order = np.lexsort((~write, cell))
        cell, unit, write = cell[order], unit[order], write[order]
        first = np.append(True, cell[1:] != cell[:-1])
        head = np.maximum.accumulate(np.where(first, np.arange(len(cell)), 0))
        bad = np.flatnonzero(write[head] & (unit != unit[head]))
        if len(bad):
            rank, column = np.divmod(int(cell[bad[0]]), self.width)
            place = f"out[{rank}:{self.chosen[column]}]" if rank < self.n else "scratch memory"
            raise ScheduleError(
                f"{self.schedule}: round {number}: one fold writes {place}, and another one of the "
                "round reads or writes it"
            )

    def judge(self) -> tuple[int, bool]:
        """Compare all results with the promise; return the most folds, and if they are the tree."""
        spec, n = self.spec, self.n
        rank, chunk = np.repeat(self.ranks, self.width), np.tile(self.chosen, n)
        wanted = np.ones(len(rank), bool)
        if spec.out_at_root:
            wanted &= rank == self.schedule.root
        if spec.out_layout == OWN:
            wanted &= chunk // self.share == rank
        sources = np.array([spec.sources(r, n) for r in range(n)])[rank]
        wanted &= sources > 0
        cell = np.flatnonzero(wanted)
        if spec.reduces:
            every = self.input(np.repeat(self.ranks, self.width), np.tile(self.chosen, n))
            sums = np.cumsum(every.reshape(n, self.width), axis=0, dtype=np.uint64)
            want = sums[sources[cell] - 1, self.column[chunk[cell]]]
        elif spec.transposes:
            source, there = chunk // self.share, rank * self.share + chunk % self.share
            want = self.input(source[cell], there[cell])
        else:
            source = np.full(len(rank), self.schedule.root)
            source = source if spec.in_at_root else chunk // self.share
            want = self.input(source[cell], chunk[cell])
        bad = np.flatnonzero(~self.known[cell] | (self.sum[cell] != want))
        if len(bad):
            i = cell[bad[0]]
            raise ScheduleError(
                f"{self.schedule}: at the end: out[{rank[i]}:{chunk[i]}] should hold what "
                f"{self.schedule.collective} promises, each contribution once, but does not"
            )
        most = int(self.folds[cell].max(initial=0))
        return most, spec.reduces and self._judge_order(cell, rank, chunk, sources)

    def _judge_order(
        self, cell: np.ndarray, rank: np.ndarray, chunk: np.ndarray, sources: np.ndarray
    ) -> bool:
        """Check that ranks fold a chunk alike; tell whether all do so in the in-order tree."""
        key = self.column[chunk[cell]] * (self.n + 1) + sources[cell]
        kinds, place, back = np.unique(key, return_index=True, return_inverse=True)
        form = self.form[cell]
        if np.any(form != form[place][back]):
            raise ScheduleError(f"{self.schedule}: ranks fold a chunk in different orders")
        declared = self.schedule.algorithm.order
        found = {}
        for order in ("tree", "rank"):
            found[order] = all(
                form[i] == self._in_order(order, int(kind % (self.n + 1)), int(chunk[cell[i]]))
                for kind, i in zip(kinds.tolist()[:SAMPLE], place.tolist()[:SAMPLE], strict=True)
            )
        if declared in found and not found[declared]:
            raise ScheduleError(f"{self.schedule} declares the order {declared!r}, but has not")
        return found["tree"]

    def _in_order(self, order: str, count: int, chunk: int) -> np.uint64:
        """Return the form of the first ranks' inputs in the tree, or in a line."""
        ranks = np.arange(count)
        leaves = _mixed(self.input(ranks, np.full(count, chunk)) + self.salt[1])
        return _form(leaves[:, None], order == "tree")[0]


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit numbers (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _pair(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _mixed(left * np.uint64(3) + _mixed(right))


def _form(forms: np.ndarray, tree: bool) -> np.ndarray:
    """Return the form of a fold of ``[sources, units]`` forms."""
    level = list(forms)
    if tree and len(level) > 3:  # up to three, the tree is a line
        extra = len(level) - (1 << (len(level).bit_length() - 1))
        pairs = [_pair(level[2 * i], level[2 * i + 1]) for i in range(extra)]
        level = pairs + level[2 * extra :]
        while len(level) > 1:
            level = [_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        return level[0]
    result = level[0]
    for each in level[1:]:
        result = _pair(result, each)
    return result


def _folded(sources: list[tuple], tree: bool) -> tuple[np.ndarray, ...]:
    """Return sum, form, folds and whether it is known, of a fold."""
    totals, forms, folds, known = zip(*sources, strict=True)
    if len(sources) == 1:
        return totals[0], forms[0], folds[0], known[0]
    most = np.maximum.reduce(folds) + 1
    total = np.add.reduce(totals, dtype=np.uint64)
    return total, _form(np.stack(forms), tree), most, np.logical_and.reduce(known)

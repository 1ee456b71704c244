"""Checking large worlds that have no symmetry: some chunks, on all ranks, in all rounds.

The schedule itself is run, not its plans, for the vector of all ranks. A value is a sum of random
numbers, one for each input: a contribution that is missing, comes twice or is of another chunk
gives another sum, but for one case in 2^60. A second number stands for the expression that was
folded, so that ranks that differ in the order of operands show. One run shows, too, what would be
otherwise if IN and OUT were one memory: an input that is read after its place was written.

Where a schedule uses no scratch memory, what is in a chunk's places only ever comes from folds that
name this chunk: so a sample of chunks is run alone. Otherwise all are, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Fold, Piece, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.language.promise import check_sizes
from pycoll.schedule.lowering.table import spans
from pycoll.schedule.proof.forms import form, lines, mixed, trees

SAMPLE = 16  # chunks
MOST_PIECES = 1 << 26  # that the folds of a round read and write
MOST_CELLS = 1 << 25  # places of all ranks together
_AT_ONCE = 1 << 20  # inputs of which the orders are looked at together


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


class _Values(NamedTuple):
    """What single folds read or make, each a column."""

    sum: np.ndarray  # of random numbers, one for each contribution
    form: np.ndarray  # stands for the expression
    folds: np.ndarray  # most folds on the way from an input
    known: np.ndarray  # whether it was written, and comes from chunks that are run
    chunk: np.ndarray  # of all its contributions, or -1


_Place = tuple[np.ndarray, np.ndarray]  # ranks and chunks


class _Access(NamedTuple):
    """Places that the single folds of a round touch, IN and OUT being one memory, or not."""

    cell: np.ndarray
    unit: np.ndarray
    write: bool
    apart: np.ndarray  # whether it touches this cell where IN and OUT are apart
    aliased: np.ndarray  # likewise where they are one


class _World:
    """The memory of all ranks, as far as it belongs to the chosen chunks, and scratch memory.

    Cells: the results of rank 0 for the chosen chunks, of rank 1, ..., then the scratch memory.
    Inputs have no cells of their own: they are known. In place, they lie where the results do.
    """

    def __init__(self, schedule: Schedule, chosen: np.ndarray, seed: int) -> None:
        self.schedule, self.spec = schedule, COLLECTIVES[schedule.collective]
        self.ranks, self.chosen = schedule.all_ranks(), chosen
        self.n, self.chunks, self.width = schedule.n, schedule.chunks, len(chosen)
        self.column = np.full(self.chunks, -1)
        self.column[chosen] = np.arange(self.width)
        size = self.n * (self.width + schedule.slots)
        self.values = _Values(
            *np.zeros((2, size), np.uint64),
            np.zeros(size, np.int32),
            np.zeros(size, bool),
            np.full(size, -1, np.int32),
        )
        self.written = np.zeros(size, bool)
        self.salt = np.random.default_rng(seed + 1).integers(1, 1 << 63, 2, np.uint64)
        self.sent = np.zeros(self.n, np.int64)
        self.share = max(1, self.chunks // self.n)
        self.alike = self.share if check_sizes(schedule) else self.chunks
        self.sources = np.array([self.spec.sources(r, self.n) for r in range(self.n)])

    def input(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the random number of inputs."""
        return mixed(mixed(rank.astype(np.uint64) + self.salt[0]) + chunk.astype(np.uint64))

    def leaf(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the form of inputs."""
        return mixed(self.input(rank, chunk) + self.salt[1])

    def held(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Whether ranks have an input there."""
        found = np.ones(len(rank), bool)
        if self.spec.in_at_root:
            found &= rank == self.schedule.root
        return found & (chunk // self.share == rank) if self.spec.in_layout == OWN else found

    def wanted(self, rank: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Whether ranks have a result there."""
        found = self.sources[rank] > 0
        if self.spec.out_at_root:
            found &= rank == self.schedule.root
        return found & (chunk // self.share == rank) if self.spec.out_layout == OWN else found

    def advance(self, number: int, folds: list[Fold]) -> None:
        """Run a round: all folds read, then all write."""
        writes: list[tuple[np.ndarray, _Values]] = []
        touched: list[_Access] = []
        for line, f in enumerate(folds):
            owner, offset, places = self._units(f)
            unit = (np.int64(line) << 40) + owner * (self.chunks + 1) + offset
            found = []
            for piece, place in zip(f.srcs, places, strict=False):
                cell, early = self._where(piece.buffer, *place)
                found.append(self._read(number, piece, owner, place, cell, early))
                real = cell >= 0
                touched.append(_Access(cell, unit, False, real & ~early, real))
            source = touched[-1].cell if len(f.srcs) == 1 and f.srcs[0].buffer != Buffer.TMP else -1
            result = _folded(found, f.tree)
            for piece, place in zip(f.dsts, places[len(f.srcs) :], strict=True):
                cell, _ = self._where(piece.buffer, *place)
                self._check_place(number, piece, owner, place, result)
                real = cell >= 0
                writes.append((cell[real], _Values(*(column[real] for column in result))))
                # In place, a copy onto itself is skipped.
                touched.append(_Access(cell, unit, True, real, real & (cell != source)))
        self._check_concurrent(number, touched, "")
        if self.schedule.algorithm.in_place:
            self._check_concurrent(number, touched, ", in place")
        for cell, result in writes:
            for column, made in zip(self.values, result, strict=True):
                column[cell] = made
            self.written[cell] = True

    def _units(self, f: Fold) -> tuple[np.ndarray, np.ndarray, list[_Place]]:
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
        places = []
        for piece, (rank, chunk) in zip(f.pieces, starts, strict=True):
            there = chunk[owner] + offset
            there = there if piece.buffer is Buffer.TMP else there % self.chunks
            places.append((rank[owner], there))
        return owner, offset, places

    def _count_sent(self, f: Fold, count: np.ndarray, starts: list[_Place]) -> None:
        for i, (rank, _) in enumerate(starts):
            away = np.where(rank != self.ranks, count, 0)
            self.sent += away if i >= len(f.srcs) else np.bincount(rank, away, self.n).astype(int)

    def _where(
        self, buffer: Buffer, rank: np.ndarray, chunk: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells, -1 for chunks that are not chosen, and whether one means the input."""
        if buffer is Buffer.TMP:
            if np.any((chunk < 0) | (chunk >= self.schedule.slots)):
                raise ScheduleError(f"{self.schedule}: a scratch slot is out of range")
            cell = self.n * self.width + rank * self.schedule.slots + chunk
            return cell, np.zeros(len(cell), bool)
        column = self.column[chunk]
        cell = np.where(column >= 0, rank * self.width + column, -1)
        if buffer is Buffer.ACC:
            return cell, ~self.written[np.maximum(cell, 0)]
        return cell, np.full(len(cell), buffer is Buffer.IN)

    def _read(
        self,
        number: int,
        piece: Piece,
        owner: np.ndarray,
        place: _Place,
        cell: np.ndarray,
        early: np.ndarray,
    ) -> _Values:
        """Return the values of a source; ``early`` tells which are inputs."""
        rank, chunk = place
        found = _Values(*(column[cell] for column in self.values))
        known = np.where(early, self.held(rank, chunk), found.known & (cell >= 0))
        if self.width == self.chunks:
            self._refuse(~known, number, piece, owner, place, "reads", "which nobody has written")
        if not np.any(early):
            return found._replace(known=known)
        here, leaf = self.input(rank, chunk), self.leaf(rank, chunk)
        if self.schedule.algorithm.in_place:
            bad = early & (cell >= 0) & self.written[cell] & (found.form != leaf)
            text = "which in place is overwritten by then: such an algorithm says in_place=False"
            self._refuse(bad, number, piece, owner, place, "reads", text)
        values = here, leaf, 0, known, chunk
        return _Values(*map(lambda a, b: np.where(early, a, b), values, found))

    def _check_place(
        self, number: int, piece: Piece, owner: np.ndarray, place: _Place, result: _Values
    ) -> None:
        """Refuse results that are stored where they must not be."""
        if piece.buffer is Buffer.TMP:
            return
        rank, chunk = place
        for bad, text in (
            (np.full(len(rank), piece.buffer is Buffer.IN), "but inputs are never written"),
            (~self.wanted(rank, chunk), "which the rank does not hold"),
            (
                result.known & ((result.chunk < 0) | ((result.chunk - chunk) % self.alike != 0)),
                "where another chunk belongs, which may be shorter; keep it in TMP",
            ),
        ):
            self._refuse(bad, number, piece, owner, place, "stores in", text)

    def _refuse(
        self,
        bad: np.ndarray,
        number: int,
        piece: Piece,
        owner: np.ndarray,
        place: _Place,
        verb: str,
        text: str,
    ) -> None:
        if np.any(bad):
            i = int(np.flatnonzero(bad)[0])
            where = f"{piece.buffer.name.lower()}[{place[0][i]}:{place[1][i]}]"
            raise ScheduleError(
                f"{self.schedule}: round {number}: rank {owner[i]} {verb} {where}, {text}"
            )

    def _check_concurrent(self, number: int, touched: list[_Access], mode: str) -> None:
        """Refuse a round in which a fold writes what another one touches, or the same twice."""
        made = [each.aliased if mode else each.apart for each in touched]
        parts = [(t.cell[m], t.unit[m], m[m] & t.write) for t, m in zip(touched, made, strict=True)]
        if not any(part[2].any() for part in parts):
            return
        cell, unit, write = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((~write, cell))
        cell, unit, write = cell[order], unit[order], write[order]
        again = np.append(False, cell[1:] == cell[:-1])
        head = np.maximum.accumulate(np.where(again, 0, np.arange(len(cell))))
        bad = np.flatnonzero((write[head] & (unit != unit[head])) | (write & again))
        if len(bad):
            rank, column = np.divmod(int(cell[bad[0]]), self.width)
            place = f"out[{rank}:{self.chosen[column]}]" if rank < self.n else "scratch memory"
            other = "another one of the round reads or writes it"
            if unit[bad[0]] == unit[head[bad[0]]]:
                other = "does so twice"
            hint = "; an algorithm that cannot work in place says in_place=False" if mode else ""
            raise ScheduleError(
                f"{self.schedule}{mode}: round {number}: one fold writes {place}, and {other}{hint}"
            )

    def judge(self) -> tuple[int, bool]:
        """Compare all results with the promise; return the most folds, and if they are the tree."""
        spec, n = self.spec, self.n
        rank, chunk = np.repeat(self.ranks, self.width), np.tile(self.chosen, n)
        cell = np.flatnonzero(self.wanted(rank, chunk))
        rank, chunk = rank[cell], chunk[cell]
        if spec.reduces:
            every = self.input(np.repeat(self.ranks, self.width), np.tile(self.chosen, n))
            sums = np.cumsum(every.reshape(n, self.width), axis=0, dtype=np.uint64)
            want = sums[self.sources[rank] - 1, self.column[chunk]]
        elif spec.transposes:
            want = self.input(chunk // self.share, rank * self.share + chunk % self.share)
        else:
            root = np.full(len(rank), self.schedule.root)
            want = self.input(root if spec.in_at_root else chunk // self.share, chunk)
        bad = np.flatnonzero(~self.values.known[cell] | (self.values.sum[cell] != want))
        if len(bad):
            i = bad[0]
            raise ScheduleError(
                f"{self.schedule}: at the end: out[{rank[i]}:{chunk[i]}] should hold what "
                f"{self.schedule.collective} promises, each contribution once, but does not"
            )
        most = int(self.values.folds[cell].max(initial=0))
        return most, spec.reduces and self._judge_order(self.values.form[cell], rank, chunk)

    def _judge_order(self, found: np.ndarray, rank: np.ndarray, chunk: np.ndarray) -> bool:
        """Check that ranks fold a chunk alike; tell whether all do so in the in-order tree."""
        column, sources = self.column[chunk], self.sources[rank]
        key = column * (self.n + 1) + sources
        _, place, back = np.unique(key, return_index=True, return_inverse=True)
        if np.any(found != found[place][back]):
            raise ScheduleError(f"{self.schedule}: ranks fold a chunk in different orders")
        have = np.zeros((self.n, self.width), np.uint64)
        wanted = np.zeros((self.n, self.width), bool)
        have[sources - 1, column], wanted[sources - 1, column] = found, True
        declared = self.schedule.algorithm.order
        if declared == "rank" and not self._in_order(lines, have, wanted):
            raise ScheduleError(f"{self.schedule} declares the order 'rank', but has not")
        tree = self._in_order(trees, have, wanted)
        if declared == "tree" and not tree:
            raise ScheduleError(f"{self.schedule} declares the order 'tree', but has not")
        return tree

    def _in_order(self, forms: Callable[..., Any], have: np.ndarray, wanted: np.ndarray) -> bool:
        """Whether results, by numbers of inputs and by chunks, have the forms of an order."""
        step = max(1, _AT_ONCE // self.n)
        for low in range(0, self.width, step):
            here = slice(low, low + step)
            chosen = self.chosen[here]
            leaves = self.leaf(self.ranks[:, None], chosen[None, :])
            for sources, want in forms(leaves):
                if np.any(wanted[sources, here] & (have[sources, here] != want)):
                    return False
        return True


def _folded(sources: list[_Values], tree: bool) -> _Values:
    """Return the values of a fold."""
    if len(sources) == 1:
        return sources[0]
    sums, forms, folds, known, chunks = zip(*sources, strict=True)
    alike = np.logical_and.reduce([chunk == chunks[0] for chunk in chunks])
    return _Values(
        np.add.reduce(sums, dtype=np.uint64),
        form(np.stack(forms), tree),
        np.maximum.reduce(folds) + 1,
        np.logical_and.reduce(known),
        np.where(alike, chunks[0], -1),
    )

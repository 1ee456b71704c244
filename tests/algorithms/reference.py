"""A small interpreter of schedules, apart from the compiler, that finds what is wrong with one.

Rounds are executed one after the other on symbolic values. A value is ``(chunk, tree)``: which
chunk it is a partial result of, and the expression tree over the ranks that contributed to it.
Trees are numbers handed out by `Trees`, so two are equal exactly when their shapes are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from pycoll.schedule.ir import ACC, IN, OUT, TMP
from pycoll.schedule.language.collectives import COLLECTIVES
from schedule.promises import inputs, outputs


class Wrong(Exception):
    """The schedule breaks a rule of the language or a promise."""


class Trees:
    """Expression trees, each made once; a tree that contains a rank twice is an error."""

    def __init__(self, n):
        self.mask = [1 << rank for rank in range(n)]
        self._known = {}

    def join(self, left, right):
        key = (left, right)
        if key not in self._known:
            if self.mask[left] & self.mask[right]:
                raise Wrong("a contribution is counted twice")
            self._known[key] = len(self.mask)
            self.mask.append(self.mask[left] | self.mask[right])
        return self._known[key]

    def chain(self, items):
        total = items[0]
        for item in items[1:]:
            total = self.join(total, item)
        return total

    def balanced(self, items):
        """Combine adjacent pairs until a power of two is left, then level by level."""
        power = 1
        while 2 * power <= len(items):
            power *= 2
        extra = len(items) - power
        level = [self.join(items[2 * i], items[2 * i + 1]) for i in range(extra)]
        level += items[2 * extra :]
        while len(level) > 1:
            level = [self.join(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]


@dataclass
class Outcome:
    """What running a schedule showed.

    Attributes:
        trees: The trees that the values refer to.
        out: ``{(rank, chunk): value}`` of all outputs.
        rounds: Number of rounds in which a rank touches another one's memory.
        moved: ``[n]`` chunks that each rank reads from or writes to others.
        slots: Number of scratch slots used.
        lines: Number of folds that a rank yields.
    """

    trees: Trees
    out: dict
    rounds: int = 0
    moved: list = field(default_factory=list)
    slots: int = 0
    lines: int = 0


def per_rank(value, n):
    """Return what an expression of a fold is on each rank."""
    return [value] * n if np.ndim(value) == 0 else value.tolist()


class Machine:
    """Executes one schedule; see `run`."""

    def __init__(self, schedule, in_place):
        self.schedule, self.n, self.chunks = schedule, schedule.n, schedule.chunks
        self.alias = {IN: OUT if in_place else IN, OUT: OUT, TMP: TMP}
        spec = COLLECTIVES[schedule.collective]
        self.inputs = set(inputs(spec, self.n, self.chunks, schedule.root))
        self.outputs = {(r, c) for r, c, _ in outputs(spec, self.n, self.chunks, schedule.root)}
        self.memory = {(r, self.alias[IN], c): (c, r) for r, c in self.inputs}
        self.written = set()
        self.result = Outcome(Trees(self.n), {}, moved=[0] * self.n)

    def locate(self, rank, buffer, chunk, write):
        """Name the memory cell of an access, checking that it exists."""
        if buffer == TMP:
            if not 0 <= chunk < self.schedule.slots:
                raise Wrong(f"slot {chunk} of {self.schedule.slots}")
            self.result.slots = max(self.result.slots, chunk + 1)
            return rank, TMP, chunk
        place = rank, chunk % self.chunks
        if buffer == ACC:
            buffer = OUT if write or place in self.written else IN
        if write and buffer == IN:
            raise Wrong(f"writes the input {place}")
        if place not in (self.inputs if buffer == IN else self.outputs):
            raise Wrong(f"{place} has no {buffer.name}")
        return rank, self.alias[buffer], place[1]

    def read(self, cell):
        if cell not in self.memory:
            raise Wrong(f"reads {cell}, which holds nothing")
        return self.memory[cell]

    def combine(self, values, tree):
        """Fold values of one chunk."""
        chunk = values[0][0]
        if len(values) == 1:
            return values[0]
        if any(c != chunk for c, _ in values):
            raise Wrong(f"combines different chunks: {values}")
        shape = self.result.trees.balanced if tree else self.result.trees.chain
        return chunk, shape([t for _, t in values])

    def units(self, folds):
        """Yield the folds of a round chunk by chunk: key, sources, destinations, tree."""
        n = self.n
        for line, fold in enumerate(folds):
            count = per_rank(fold.count, n)
            active = per_rank(fold.where, n)
            columns = [
                (per_rank(p.rank, n), p.buffer, per_rank(p.chunk, n))
                for p in (*fold.srcs, *fold.dsts)
            ]
            nsrc = len(fold.srcs)
            for owner in range(n):
                if not active[owner]:
                    continue
                for ranks, _, _ in columns:
                    if not -2 * n <= ranks[owner] < 2 * n:
                        raise Wrong(f"rank {ranks[owner]} is out of range")
                for i in range(count[owner]):
                    pieces = [(r[owner] % n, buffer, c[owner] + i) for r, buffer, c in columns]
                    yield (owner, line, i), pieces[:nsrc], pieces[nsrc:], fold.tree

    def step(self, folds):
        """Execute one round: all reads, then all writes, with no conflict among them."""
        readers, writes, moved = defaultdict(set), {}, self.result.moved
        remote = False
        for key, sources, targets, tree in self.units(folds):
            cells = [self.locate(*piece, write=False) for piece in sources]
            for cell in cells:
                readers[cell].add(key)
            value = self.combine([self.read(cell) for cell in cells], tree)
            stores = [(self.locate(*piece, write=True), piece[1]) for piece in targets]
            for cell, _ in stores:
                if cell in writes:
                    raise Wrong(f"{cell} is written twice in a round")
                writes[cell] = key, value
            away = sum(cell[0] != key[0] for cell in cells)
            away += sum(cell[0] != key[0] for cell, _ in stores)
            moved[key[0]] += away
            remote |= away > 0
        for cell, (key, value) in writes.items():
            if readers.get(cell, {key}) != {key}:
                raise Wrong(f"{cell} is read by {readers[cell]} while {key} writes it")
            self.memory[cell] = value
            if cell[1] == OUT:
                self.written.add((cell[0], cell[2]))
        self.result.rounds += remote


def run(schedule, in_place=False):
    """Run a schedule and check everything that its collective promises.

    Raises:
        Wrong: At the first rule that is broken.
    """
    machine = Machine(schedule, in_place)
    result = machine.result
    for number, folds in enumerate(schedule.rounds(schedule.all_ranks())):
        result.lines += len(folds)
        try:
            machine.step(folds)
        except Wrong as error:
            raise Wrong(f"{schedule} in_place={in_place}, round {number}: {error}") from None
    spec = COLLECTIVES[schedule.collective]
    for rank, chunk, wanted in outputs(spec, schedule.n, machine.chunks, schedule.root):
        value = machine.memory.get((rank, OUT, chunk))
        result.out[rank, chunk] = value
        mask = sum(1 << source for source, _ in wanted)
        if value is None or value[0] != wanted[0][1] or result.trees.mask[value[1]] != mask:
            raise Wrong(f"{schedule} in_place={in_place}: rank {rank}, chunk {chunk} holds {value}")
    _check_order(schedule, result)
    return result


def _check_order(schedule, result):
    """Check that all ranks agree, and that the declared order is the one found."""
    if not COLLECTIVES[schedule.collective].reduces:
        return
    by_place = defaultdict(set)  # by chunk, and the ranks that contribute
    for chunk, tree in result.out.values():
        by_place[chunk, result.trees.mask[tree]].add(tree)
    order = schedule.algorithm.order
    if any(len(trees) > 1 for trees in by_place.values()):
        raise Wrong(f"{schedule}: ranks disagree about the bits of a chunk")
    for (_, mask), trees in by_place.items():
        leaves = [rank for rank in range(schedule.n) if mask >> rank & 1]
        if order == "tree" and trees != {result.trees.balanced(leaves)}:
            raise Wrong(f"{schedule}: the order is not that of the in-order tree")
        if order == "rank" and trees != {result.trees.chain(leaves)}:
            raise Wrong(f"{schedule}: the order is not that of the ranks")

"""Proving large worlds by symmetry: one rank's plan over messages stands for all.

A schedule is *rotational* if every rank does what rank 0 does, moved by its number: ranks by r, and
chunks too. That is not assumed: the generator is called with a rank that can only be added to
(`pycoll.schedule.language.relative`), and plans of other ranks are compared with rank 0's.

Then all ranks run one program, so they go on together, from one WAIT to the next. What rank 0 sends
to the rank d ahead, it receives from the rank d behind, moved by -d. So its own memory is enough to
know every value on every rank:

* a message to the rank d ahead needs a receive from the rank d behind, in the same place among the
  others between these two ranks, in the same phase, and of the same length; else somebody waits for
  ever;
* between two WAITs nothing may be written that is sent, or written twice;
* a value is an expression over inputs, and by how much it is moved.

It takes as long as one plan is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Buffer, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.lowering.messages import message_plan
from pycoll.schedule.lowering.plan import FOLD_COMPLETE, Opcode, Plan, PlanBuffer

_MOST_PEERS = 32  # of a rank whose plan is compared, the messages to so many are followed
COMPARED = 6  # plans of so many other ranks are compared with rank 0's


def rotational(schedule: Schedule) -> bool:
    """Whether every rank does what rank 0 does, ranks and chunks moved by its number."""
    lines = schedule.relative
    if lines is None or schedule.chunks != schedule.n or schedule.n < 2:
        return False
    user = lines.buffer != Buffer.TMP.value
    return bool(lines.moves.all() and lines.moves_chunk[user].all())


class _Value(NamedTuple):
    """An expression, and by how many ranks and chunks it is moved."""

    node: int
    moved: int


@dataclass(frozen=True)
class Symmetric:
    """What is known of a rotational schedule whose message plans are proven."""

    rounds: int  # number of rounds
    sent: int  # chunks that leave a rank
    roundings: int  # largest number of folds on the way from an input to an output
    compared: tuple[int, ...]  # ranks whose plans were compared with rank 0's


def prove_symmetric(schedule: Schedule) -> Symmetric:
    """Prove the message plans of all ranks by rank 0's, in both forms and with IN and OUT aliased.

    Args:
        schedule: A `rotational` one.

    Raises:
        ScheduleError: Naming schedule, round and piece, as rank 0 sees it.
    """
    others = _compared(schedule.n)
    in_place = schedule.algorithm.in_place_staged
    reduces = COLLECTIVES[schedule.collective].reduces
    found: list[_Rank] = []
    for apart in (False, True) if reduces else (False,):
        plan = message_plan(schedule, 0, apart=apart)
        for rank in others:
            _check_alike(plan, rank, apart)
        for aliased in (True, False) if in_place and not apart else (False,):
            found.append(_Rank(plan, aliased))
            found[-1].run()
    results = {tuple(each.results) for each in found}
    if len(results) > 1:
        raise ScheduleError(f"{schedule}: results differ between plans, or in place")
    last = found[-1]
    return Symmetric(last.plan.rounds, last.sent, last.depth, others)


def _compared(n: int) -> tuple[int, ...]:
    rng = np.random.default_rng(n)
    drawn = rng.integers(1, n, COMPARED).tolist()
    return tuple(sorted({1, n // 2, n - 1, *drawn} - {0})[:COMPARED])


def _check_alike(plan: Plan, rank: int, apart: bool) -> None:
    """Refuse a plan of another rank that is not rank 0's, moved.

    A range of chunks that goes beyond the last one is several messages there. So chunks are
    compared one by one, and for messages also which one goes where, if ranges are cut otherwise.
    """
    schedule = plan.schedule
    other = message_plan(schedule, rank, apart=apart)
    if _same(plan, other):
        return
    alike = _chunk_by_chunk(plan) == _chunk_by_chunk(other)
    if alike and not (len(plan.code) == len(other.code) and _single(plan)):
        n = schedule.n
        peers = np.unique(other.code["peer"][other.code["op"] == Opcode.SEND.value]).tolist()
        for peer in peers[:: max(1, len(peers) // _MOST_PEERS)]:
            ahead = (peer - rank) % n
            there = message_plan(schedule, peer, apart=apart)
            want = _joined(_posted(plan, Opcode.SEND, ahead), _posted(plan, Opcode.RECV, n - ahead))
            got = _joined(_posted(other, Opcode.SEND, peer), _posted(there, Opcode.RECV, rank))
            alike = alike and want is not None and want == got
    if not alike:
        raise ScheduleError(f"{schedule}: the plan of rank {rank} is not that of rank 0, moved")


def _same(plan: Plan, other: Plan) -> bool:
    """Whether a plan is rank 0's, moved, instruction by instruction."""
    if len(plan.code) != len(other.code) or len(plan.operands) != len(other.operands):
        return False
    n, move = plan.schedule.n, other.rank
    code, operands = other.code.copy(), other.operands.copy()
    posted = (code["op"] == Opcode.SEND.value) | (code["op"] == Opcode.RECV.value)
    code["peer"][posted] = (code["peer"][posted].astype(np.int64) - move) % n
    user = operands["buffer"] != PlanBuffer.STAGING.value
    operands["chunk"][user] = (operands["chunk"][user].astype(np.int64) - move) % n
    operands["rank"] = 0
    return np.array_equal(code, plan.code) and np.array_equal(operands, plan.operands)


def _single(plan: Plan) -> bool:
    """Whether no two messages of a phase go the same way: none can be taken for another."""
    op = plan.code["op"]
    posted = (op == Opcode.SEND.value) | (op == Opcode.RECV.value)
    phase = np.cumsum(op == Opcode.WAIT.value)
    key = (phase * 8 + op)[posted] * plan.schedule.n + plan.code["peer"][posted]
    return len(np.unique(key)) == len(key)


def _back(plan: Plan, piece: tuple[int, int, int], count: int) -> list[tuple[int, int]]:
    """Return the cells of a piece, chunks of users' buffers moved back to rank 0."""
    _, buffer, chunk = piece
    if buffer == PlanBuffer.STAGING:
        return [(buffer, chunk + k) for k in range(count)]
    return [(buffer, (chunk + k - plan.rank) % plan.schedule.n) for k in range(count)]


def _chunk_by_chunk(plan: Plan) -> list[list[tuple]]:
    """Return each phase of a plan, and the folds behind it, for single chunks in a fixed order."""
    n, pieces = plan.schedule.n, plan.operands.tolist()
    phases: list[list[tuple]] = [[]]
    for op, flags, nsrc, ndst, peer, arg, count, round_ in plan.code.tolist():
        if op == Opcode.WAIT:
            phases += [[]]
            continue
        distance = (peer - plan.rank) % n if op != Opcode.FOLD else flags
        used = pieces[arg : arg + (nsrc + ndst if op == Opcode.FOLD else 1)]
        cells = zip(*(_back(plan, piece, count) for piece in used), strict=True)
        phases[-1] += [(op, distance, nsrc, round_, *each) for each in cells]
    return [sorted(phase) for phase in phases]


def _posted(plan: Plan, op: Opcode, peer: int) -> list[list[tuple[int, int]]]:
    """Return the cells of each message to or from a peer, in the order of the plan."""
    pieces = plan.operands.tolist()
    mine = plan.code[(plan.code["op"] == op.value) & (plan.code["peer"] == peer)]
    columns = zip(mine["arg"].tolist(), mine["count"].tolist(), strict=True)
    return [_back(plan, pieces[arg], count) for arg, count in columns]


def _joined(sends: list[list], receives: list[list]) -> list[tuple] | None:
    """Return from which cell to which each chunk goes, sorted; None if messages do not match."""
    if list(map(len, sends)) != list(map(len, receives)):
        return None
    return sorted(
        pair for a, b in zip(sends, receives, strict=True) for pair in zip(a, b, strict=True)
    )


class _Post(NamedTuple):
    """A message under way: its cells, and what was sent."""

    cells: list[tuple[int, int]]
    values: list[_Value]


class _Rank:
    """Rank 0 of a rotational world: its memory, and what it has under way."""

    def __init__(self, plan: Plan, aliased: bool) -> None:
        """Fill the inputs of rank 0."""
        schedule = plan.schedule
        spec = COLLECTIVES[schedule.collective]
        self.plan, self.n, self.aliased, self.spec = plan, schedule.n, aliased, spec
        self.where = "at the start"
        self.reads_in = {0} if spec.in_layout == OWN else range(self.n)
        self.writes_out = {0} if spec.out_layout == OWN else range(self.n)
        self.known: dict[tuple, int] = {}
        # Of each expression at move 0, the inputs first: its chunk (-1: several), the ranks that
        # contribute as disjoint intervals (None: one of them twice), folds on the longest path,
        # and whether a complete fold made it.
        self.chunk = list(range(self.n))
        self.ranks: list[list[tuple[int, int]] | None] = [[(0, 1)]] * self.n
        self.folds = [0] * self.n
        self.complete = [False] * self.n
        self.memory = {self._cell(PlanBuffer.IN, c): _Value(c, 0) for c in self.reads_in}
        self.sends: dict[int, list[_Post]] = defaultdict(list)
        self.receives: dict[int, list[_Post]] = defaultdict(list)
        self.sent = self.depth = 0
        self.results: list[_Value] = []

    def _fail(self, text: str) -> ScheduleError:
        form = "in place" if self.aliased else "IN and OUT apart"
        return ScheduleError(f"{self.plan.schedule}, messages, {form}: {self.where}: {text}")

    def _cell(self, buffer: int, chunk: int) -> tuple[int, int]:
        if self.aliased and buffer == PlanBuffer.OUT:
            buffer = PlanBuffer.IN
        return int(buffer), chunk

    def run(self) -> None:
        """Run the plan, and check what it leaves."""
        pieces = self.plan.operands.tolist()
        for i, row in enumerate(self.plan.code.tolist()):
            op, flags, nsrc, ndst, peer, arg, count, round_ = row
            self.where = f"rank 0, round {round_}, instruction {i}"
            if op == Opcode.FOLD:
                self._fold(flags, pieces[arg : arg + nsrc], pieces[arg + nsrc :][:ndst], count)
            elif op == Opcode.WAIT:
                self._complete()
            else:
                self._post(op == Opcode.SEND, peer % self.n, pieces[arg], count)
        self.where = "rank 0, at the end"
        if self.sends or self.receives:
            raise self._fail("messages are under way that nobody waits for")
        self._judge()

    def _cells(self, piece: tuple[int, int, int], count: int, write: bool) -> list[tuple[int, int]]:
        """Return the cells of a piece; refuse those that are not there, or may not be written."""
        rank, buffer, chunk = piece
        if rank != 0:
            raise self._fail(f"names memory of rank {rank}")
        most = self.plan.slots if buffer == PlanBuffer.STAGING else self.n
        held = self.writes_out if buffer == PlanBuffer.OUT else self.reads_in
        for c in range(chunk, chunk + count):
            if c >= most or (buffer != PlanBuffer.STAGING and c not in held):
                raise self._fail(f"touches {PlanBuffer(buffer).name.lower()}[0:{c}]: not its own")
        if write and buffer == PlanBuffer.IN and not self.aliased:
            raise self._fail(f"writes in[0:{chunk}]")
        return [self._cell(buffer, c) for c in range(chunk, chunk + count)]

    def _read(self, cell: tuple[int, int]) -> _Value:
        if cell not in self.memory:
            raise self._fail(f"reads {_name(cell)}, which nobody has written")
        return self.memory[cell]

    # --- Messages ---------------------------------------------------------------------------------

    def _post(self, send: bool, peer: int, piece: tuple[int, int, int], count: int) -> None:
        if peer == 0:
            raise self._fail("sends to itself")
        cells = self._cells(piece, count, not send)
        values = [self._read(cell) for cell in cells] if send else []
        self.sent += count * send
        (self.sends if send else self.receives)[peer].append(_Post(cells, values))

    def _busy(self) -> tuple[set[tuple[int, int]], list[tuple[int, int]]]:
        """Return the cells that are sent, and those that are received, under way."""
        sent = {cell for posts in self.sends.values() for post in posts for cell in post.cells}
        return sent, [c for posts in self.receives.values() for post in posts for c in post.cells]

    def _complete(self) -> None:
        """Let every message under way arrive: it is what this rank sends, moved."""
        sent, received = self._busy()
        if len(set(received)) < len(received) or sent & set(received):
            raise self._fail("receives where it sends from, or twice in one place")
        for ahead, posts in self.sends.items():
            others = self.receives.get(self.n - ahead, [])
            sizes = [[len(post.cells) for post in each] for each in (posts, others)]
            if sizes[0] != sizes[1]:
                raise self._fail(
                    f"sends {sizes[0]} chunks to the rank {ahead} ahead, which receives {sizes[1]} "
                    "from it: somebody waits for ever"
                )
        if unmet := [behind for behind in self.receives if self.n - behind not in self.sends]:
            raise self._fail(
                f"receives from rank {unmet[0]}, which sends nothing: it waits for ever"
            )
        for behind, posts in self.receives.items():
            for mine, theirs in zip(posts, self.sends[self.n - behind], strict=True):
                for cell, value in zip(mine.cells, theirs.values, strict=True):
                    self._write(cell, _Value(value.node, (value.moved + behind) % self.n))
        self.sends.clear()
        self.receives.clear()

    # --- Folds ------------------------------------------------------------------------------------

    def _fold(self, flags: int, srcs: list, dsts: list, count: int) -> None:
        sources = [self._cells(piece, count, False) for piece in srcs]
        targets = [self._cells(piece, count, True) for piece in dsts]
        touched = {cell for cells in (*sources, *targets) for cell in cells}
        sent, received = self._busy()
        if touched & set(received) or sent & {cell for cells in targets for cell in cells}:
            raise self._fail("folds what is under way")
        for k in range(count):
            values = [self._read(cells[k]) for cells in sources]
            for cells in targets:
                self._write(cells[k], self._folded(flags, values))

    def _folded(self, flags: int, values: list[_Value]) -> _Value:
        """Return the value of a fold, as rank 0's expression of it and how far it is moved."""
        if len(values) == 1:
            return values[0]
        moved = values[0].moved
        parts = tuple(_Value(v.node, (v.moved - moved) % self.n) for v in values)
        found = self.known.get((flags, parts))
        if found is None:
            found = self.known[flags, parts] = len(self.chunk)
            chunks = {(self.chunk[v.node] + v.moved) % self.n for v in parts}
            mixed = len(chunks) > 1 or any(self.chunk[v.node] < 0 for v in parts)
            self.chunk.append(-1 if mixed else chunks.pop())
            self.ranks.append(self._union(parts))
            self.folds.append(1 + max(self.folds[v.node] for v in parts))
            self.complete.append(bool(flags & FOLD_COMPLETE))
        return _Value(found, moved)

    def _union(self, parts: tuple[_Value, ...]) -> list[tuple[int, int]] | None:
        """Return the ranks that contribute as intervals of 0..n-1; None if any does twice."""
        ends = []
        for value in parts:
            own = self.ranks[value.node]
            if own is None:
                return None
            for low, size in own:
                start = (low + value.moved) % self.n
                ends.append((start, min(self.n, start + size)))
                ends += [(0, start + size - self.n)] if start + size > self.n else []
        ends.sort()
        merged: list[tuple[int, int]] = []
        for low, high in ends:
            if merged and low < merged[-1][1]:
                return None
            if merged and low == merged[-1][1]:
                merged[-1] = merged[-1][0], high
            else:
                merged.append((low, high))
        return [(low, high - low) for low, high in merged]

    def _write(self, cell: tuple[int, int], value: _Value) -> None:
        if cell[0] != PlanBuffer.STAGING and OWN not in (self.spec.in_layout, self.spec.out_layout):
            chunk = self.chunk[value.node]
            if not self.spec.transposes and (chunk + value.moved) % self.n != cell[1]:
                raise self._fail(f"stores another chunk in {_name(cell)}, which may be shorter")
        if self.chunk[value.node] < 0:
            raise self._fail(f"stores a mixture of chunks in {_name(cell)}")
        self.memory[cell] = value

    # --- What is left -----------------------------------------------------------------------------

    def _judge(self) -> None:
        """Compare every output of rank 0 with the promise, and with other ranks' outputs."""
        for chunk in self.writes_out:
            cell = self._cell(PlanBuffer.OUT, chunk)
            value = self._read(cell)
            self.results.append(value)
            self.depth = max(self.depth, self.folds[value.node])
            if self.spec.reduces:
                self._judge_sum(cell, value)
                continue
            source = (chunk, 0) if self.spec.transposes else (chunk, chunk)
            if value.node >= self.n or (value.moved, self._chunk(value)) != source:
                raise self._fail(f"{_name(cell)} should hold in[{source[0]}:{source[1]}]")
        first = self.results[0]
        for chunk, value in zip(self.writes_out, self.results, strict=True):
            same = value.node == first.node and (value.moved - chunk - first.moved) % self.n == 0
            if self.spec.reduces and not same:
                raise self._fail(f"chunk {chunk} is folded in another order on another rank")

    def _chunk(self, value: _Value) -> int:
        return (self.chunk[value.node] + value.moved) % self.n

    def _judge_sum(self, cell: tuple[int, int], value: _Value) -> None:
        ranks = self.ranks[value.node]
        if ranks != [(0, self.n)] or self._chunk(value) != cell[1]:
            missing = self.n - sum(size for _, size in ranks) if ranks else 0
            what = f"{missing} ranks are missing" if ranks else "some ranks count twice"
            raise self._fail(f"{_name(cell)} should hold all ranks' chunk, each once: {what}")
        if self.plan.scales_in_fold and not self.complete[value.node]:
            raise self._fail(f"{_name(cell)} would not be divided for the average")


def _name(cell: tuple[int, int]) -> str:
    return f"{PlanBuffer(cell[0]).name.lower()}[0:{cell[1]}]"

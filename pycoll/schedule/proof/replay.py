"""Executing plans with numbers, in an adversarial order: a second opinion on the verifier.

It shares no code with the interpreters. One instruction runs at a time; which rank goes next
follows priorities that change at random moments. Callers spoil their arrays before they enter and
as soon as they return. A value is a pair: a sum of random numbers, and a hash of the expression
that made it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np

from pycoll.schedule.ir import Schedule
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import FOLD_TREE, Opcode, Plan, PlanBuffer


class Replay:
    """One execution of the plans of all ranks, with one seed."""

    def __init__(self, plans: list[Plan], *, in_place: bool, seed: int) -> None:
        """Prepare memory in which every piece holds rubbish."""
        self.plans = plans
        self.in_place = in_place
        self.rng: random.Random = random.Random(seed)
        self.schedule: Schedule = plans[0].schedule
        self.promise: Promise = Promise.of(self.schedule)
        n = self.promise.n
        self.chunks: int = self.promise.chunks
        self.memory: defaultdict[Any, tuple[int, int]] = defaultdict(self._rubbish)
        held = np.argwhere(self.promise.in_held).tolist()
        self.inputs: dict[tuple[int, int], tuple[int, int]] = {
            (rank, chunk): self._rubbish() for rank, chunk in held
        }
        self.outputs: list[list[int]] = np.argwhere(self.promise.out_held).tolist()
        self.found: dict[tuple[int, int], tuple[int, int]] = {}
        self.next: list[int] = [-1] * n
        self.steps: list[int] = [0] * n
        self.posted: list[list[list[Any]]] = [[] for _ in range(n)]
        self.programs: list[list[tuple[int, ...]]] = [
            [tuple(int(v) for v in instr) for instr in plan.code.tolist()] for plan in plans
        ]
        self.pieces: list[list[tuple[int, ...]]] = [plan.operands.tolist() for plan in plans]

    def _rubbish(self) -> tuple[int, int]:
        return self.rng.getrandbits(64), self.rng.getrandbits(64)

    def _cell(self, piece: tuple[int, int, int], offset: int = 0) -> tuple[int, int, int]:
        rank, buffer, chunk = piece
        if self.in_place and buffer == PlanBuffer.OUT:
            buffer = PlanBuffer.IN
        return int(buffer), rank, chunk + offset

    def run(self) -> str:
        """Execute everything; return what went wrong, or an empty text."""
        n = len(self.plans)
        priority = self.rng.sample(range(n), n)
        length = sum(map(len, self.programs)) + n
        changes = {self.rng.randrange(length) for _ in range(self.rng.randrange(2 * n))}
        tick = 0
        while True:
            left = [r for r in range(n) if self.next[r] <= len(self.programs[r])]
            if not left:
                return self._compare()
            rank = next((r for r in sorted(left, key=priority.__getitem__) if self._step(r)), None)
            if rank is None:
                return "deadlock"
            tick += 1
            if tick in changes:
                priority[rank] = max(priority) + 1

    def _step(self, rank: int) -> bool:
        """Execute the next instruction of a rank; tell whether it could."""
        at = self.next[rank]
        if at == -1:
            self._enter(rank)
        elif at == len(self.programs[rank]):
            self._leave(rank)
        elif not self._execute(rank, self.programs[rank][at]):
            return False
        self.next[rank] += 1
        return True

    def _enter(self, rank: int) -> None:
        for (owner, chunk), value in self.inputs.items():
            if owner == rank:
                self.memory[self._cell((rank, PlanBuffer.IN, chunk))] = value

    def _leave(self, rank: int) -> None:
        for owner, chunk in self.outputs:
            if owner == rank:
                self.found[owner, chunk] = self.memory[self._cell((rank, PlanBuffer.OUT, chunk))]
        for chunk in range(self.chunks):
            for buffer in (PlanBuffer.IN, PlanBuffer.OUT):
                self.memory[self._cell((rank, buffer, chunk))] = self._rubbish()

    def _execute(self, rank: int, instr: tuple[int, ...]) -> bool:
        op, flags, nsrc, ndst, peer, arg, count, _ = instr
        pieces = self.pieces[rank]
        if op == Opcode.FOLD:
            for k in range(count):
                values = [self.memory[self._cell(pieces[arg + i], k)] for i in range(nsrc)]
                result = _fold(values, bool(flags & FOLD_TREE))
                for i in range(nsrc, nsrc + ndst):
                    self.memory[self._cell(pieces[arg + i], k)] = result
        elif op == Opcode.SIGNAL:
            self.steps[rank] = arg
        elif op in (Opcode.SEND, Opcode.RECV):
            self.posted[rank].append([op, peer, pieces[arg], count])
        elif self.plans[rank].messages:
            return self._complete(rank)
        else:
            return self.steps[peer] >= arg
        return True

    def _complete(self, rank: int) -> bool:
        """Move what is posted at both ends; tell whether nothing of the rank is left."""
        for move in list(self.posted[rank]):
            op, peer, piece, count = move
            opposite = Opcode.RECV if op == Opcode.SEND else Opcode.SEND
            mine = [m for m in self.posted[rank] if m[0] == op and m[1] == peer]
            theirs = [m for m in self.posted[peer] if m[0] == opposite and m[1] == rank]
            if mine[0] is not move or not theirs or theirs[0][3] != count:
                continue
            pair = (piece, theirs[0][2]) if op == Opcode.SEND else (theirs[0][2], piece)
            for k in range(count):
                self.memory[self._cell(pair[1], k)] = self.memory[self._cell(pair[0], k)]
            self.posted[rank].remove(move)
            self.posted[peer].remove(theirs[0])
        return not self.posted[rank]

    def _compare(self) -> str:
        seen: dict[tuple[int, int], int] = {}
        reduces = self.promise.reduces
        for rank, chunk in self.outputs:
            origin = divmod(int(self.promise.origin[rank, chunk]), self.chunks)
            count = int(self.promise.sources[rank])
            wanted = [(source, chunk) for source in range(count)] if reduces else [origin]
            total = sum(self.inputs[source][0] for source in wanted)
            value, expression = self.found[rank, chunk]
            if value != total:
                return f"rank {rank} has a wrong chunk {chunk}"
            if reduces and seen.setdefault((count, chunk), expression) != expression:
                return f"rank {rank} has other bits in chunk {chunk}"
        return ""


def _fold(values: list[tuple[int, int]], tree: bool) -> tuple[int, int]:
    if len(values) == 1:
        return values[0]
    return sum(v[0] for v in values), hash((tree, *(v[1] for v in values)))


def replay(plans: list[Plan], *, in_place: bool = False, seeds: int = 10) -> str:
    """Execute plans in several orders; return the first thing that went wrong, or an empty text."""
    for seed in range(seeds):
        for aliased in (False, True) if in_place else (False,):
            text = Replay(plans, in_place=aliased, seed=seed).run()
            if text:
                return text
    return ""

"""Running the peer plans of all ranks at once: deadlocks, and what happens before what.

A rank's program is cut into *blocks*: some WAITs, then everything up to the next WAIT. Signals are
counters that only grow, so whether a block can start never depends on timing: one run decides for
all interleavings whether the plans deadlock. The run advances in *waves*; in each wave every rank
executes its next block if all its waits are satisfied. A block carries a vector clock: for each
rank, how much of its program has happened before the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.errors import ScheduleError
from pycoll.schedule.language.promise import Promise
from pycoll.schedule.lowering.plan import ENTERED, Opcode
from pycoll.schedule.lowering.table import spans
from pycoll.schedule.proof.bounds import Joined
from pycoll.schedule.proof.trace import Trace, Units, conflicts

_CALLER = 255  # stands in the opcode column for "the caller may use its arrays"


class World:
    """The programs of all ranks over some calls, rank by rank, each in program order.

    Per call there are the caller, the gate and the plan; at the end the caller again.
    """

    # ``[events]``, like `place` and `block`; the caller's events have the round -1, and `instr`
    # numbers the instructions of the joined code, or is -1
    op: np.ndarray
    rank: np.ndarray
    call: np.ndarray
    peer: np.ndarray
    step: np.ndarray
    round: np.ndarray
    instr: np.ndarray

    def __init__(self, joined: Joined, calls: int) -> None:
        """Lay the programs out.

        Raises:
            ScheduleError: If a step is published out of order, or waited for and never published.
        """
        code = joined.code
        self.title: str = joined.title
        self.n: int = len(joined.plans)
        self.calls = calls
        everyone, index = np.arange(self.n), np.arange(len(code))
        parts = []  # op, rank, call, phase, peer, step, round, instruction
        for call in range(calls + 1):
            parts.append(_column(self.n, _CALLER, everyone, call, 0, 0, 0, -1, -1))
        for call in range(1, calls):
            rank, peer = np.nonzero(~np.eye(self.n, dtype=bool))
            parts.append(_column(len(rank), Opcode.WAIT, rank, call, 1, peer, ENTERED, 0, -1))
        for call in range(calls):
            steps = code["peer"], code["arg"], code["round"], index
            parts.append(_column(len(code), code["op"], joined.rank, call, 2, *steps))
        columns = np.concatenate(parts, axis=1)
        order = np.lexsort((np.arange(columns.shape[1]), columns[3], columns[2], columns[1]))
        self.op, self.rank, self.call, phase, self.peer, self.step, self.round, self.instr = (
            columns[:, order]
        )
        first = np.searchsorted(self.rank, everyone)
        # In the rank's program, from 1.
        self.place: np.ndarray = np.arange(len(order)) - first[self.rank] + 1
        wait = self.op == Opcode.WAIT
        starts = (self.place == 1) | (wait & ~np.concatenate([[False], wait[:-1]]))
        self.block: np.ndarray = np.cumsum(starts) - 1  # blocks are numbered rank by rank
        self.first_block: np.ndarray = np.append(self.block[first], self.block[-1] + 1)  # [n + 1]
        self.waits: np.ndarray = np.flatnonzero(wait)  # events
        awaited = self.call[self.waits] - (phase[self.waits] == 1)
        # ``[waits]`` event that each wait waits for.
        self.signal: np.ndarray = self._signals(awaited)

    def _signals(self, awaited: np.ndarray) -> np.ndarray:
        """Find for each wait the first signal of the awaited call that satisfies it."""
        signals, waits = np.flatnonzero(self.op == Opcode.SIGNAL), self.waits
        series = (self.rank[signals] * self.calls + self.call[signals]) << 17
        key = series + self.step[signals]
        bad = np.flatnonzero(np.diff(key) <= 0)
        if len(bad):
            at = signals[bad[0] + 1]
            raise ScheduleError(
                f"{self.where(at)}: publishes step {self.step[at]} "
                f"after step {self.step[signals[bad[0]]]}; steps must increase"
            )
        entered = key[self.step[signals] == ENTERED] >> 17
        missing = np.flatnonzero(np.bincount(entered, minlength=self.n * self.calls) == 0)
        if len(missing):
            raise ScheduleError(
                f"{self.title}: rank {missing[0] // self.calls} never publishes that it has entered"
            )
        wanted = ((self.peer[waits] * self.calls + awaited) << 17) + self.step[waits]
        found = np.searchsorted(key, wanted)
        known = found < len(key)
        known[known] = key[found[known]] >> 17 == wanted[known] >> 17
        if not np.all(known):
            at = waits[np.flatnonzero(~known)[0]]
            raise ScheduleError(
                f"{self.where(at)}: waits for step {self.step[at]} of rank {self.peer[at]}, "
                "which never publishes it"
            )
        return signals[found]

    def where(self, event: int) -> str:
        """Say where an event stands, to begin an error."""
        return f"{self.title}: rank {self.rank[event]}, round {self.round[event]}"


@dataclass(frozen=True)
class Run:
    """A run of a world to its end."""

    world: World  # what ran
    # ``[blocks, n]`` place up to which the program of each rank has happened before
    clock: np.ndarray
    when: np.ndarray  # ``[events]`` a linear extension of happens-before
    units: Units  # the unit folds


def _column(size: int, *values: int | np.ndarray) -> np.ndarray:
    """One column of events: opcode, rank, call, phase, peer, step, round, instruction."""
    return np.stack([np.broadcast_to(np.asarray(v, np.int64), size) for v in values])


def run_peer(joined: Joined, calls: int = 1) -> Run:
    """Run peer plans to their end.

    Args:
        joined: The plans of all ranks.
        calls: Number of consecutive calls of the same plans.

    Raises:
        ScheduleError: If ranks wait for each other for ever.
    """
    world = World(joined, calls)
    wave, clock = _advance(world)
    order = np.lexsort((world.place, world.rank, wave[world.block]))
    when = np.empty(len(order), np.int64)
    when[order] = np.arange(len(order))
    folds = np.flatnonzero(world.op == Opcode.FOLD)
    units = Units(joined.code[world.instr[folds]], joined.operands, folds, world.call[folds])
    return Run(world, clock, when, units)


def _advance(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Run in waves; return the wave and the vector clock of every block."""
    n, blocks = world.n, int(world.first_block[-1])
    clock = np.zeros((blocks, n), np.int32)
    wave = np.full(blocks, -1)
    count = np.bincount(world.block[world.waits], minlength=blocks)
    first = np.cumsum(count) - count
    peer, target = world.rank[world.signal], world.block[world.signal]
    reached = world.place[world.signal].astype(np.int32)
    current = world.first_block[:-1].copy()
    start, end = world.first_block[:-1], world.first_block[1:]
    number = 0
    while True:
        active = np.flatnonzero(current < end)
        if not len(active):
            return wave, clock
        block = current[active]
        row, place = spans(count[block])
        wait = first[block[row]] + place
        ready = np.ones(len(active), bool)
        ready[row[current[peer[wait]] <= target[wait]]] = False
        if not np.any(ready):
            _deadlock(world, block)
        active, block = active[ready], block[ready]
        keep = ready[row]
        row, wait = row[keep], wait[keep]
        known = clock[target[wait]]
        known[np.arange(len(wait)), peer[wait]] = reached[wait]
        later = block > start[active]
        clock[block[later]] = clock[block[later] - 1]
        if len(wait):
            heads = np.flatnonzero(np.diff(row, prepend=-1))
            joined = block[count[block] > 0]
            clock[joined] = np.maximum(clock[joined], np.maximum.reduceat(known, heads, axis=0))
        wave[block] = number
        current[active] += 1
        number += 1


def _deadlock(world: World, blocked: np.ndarray) -> None:
    chain = []
    current = {int(world.rank[np.searchsorted(world.block, b)]): int(b) for b in blocked}
    for rank, block in current.items():
        waits = np.flatnonzero(world.block[world.waits] == block)
        for i in waits:
            event, target = world.waits[i], world.signal[i]
            peer = int(world.rank[target])
            if current.get(peer, -1) >= 0 and world.block[target] >= current[peer]:
                chain.append(
                    f"rank {rank}, round {world.round[event]}, waits for step {world.step[event]} "
                    f"of rank {peer}"
                )
                break
    raise ScheduleError(f"{world.title}: deadlock: {'; '.join(chain[:8])}")


def trace_of(run: Run, promise: Promise, aliased: bool) -> Trace:
    """List all accesses of a run, IN and OUT being the same memory or not."""
    world = run.world
    users = np.flatnonzero(world.op == _CALLER)
    last = users[world.call[users] == world.calls]
    events = world.rank, world.round, run.when
    return Trace(promise, world.title, aliased, events, run.units, users, last)


def check_races(run: Run, trace: Trace) -> None:
    """Check that every two conflicting accesses are ordered by happens-before.

    Only neighbours in the linear extension are compared: each access with the last write before it,
    each read with the next write after it. Every other conflicting pair follows by transitivity.

    Raises:
        ScheduleError: Naming both ranks, rounds and the piece.
    """
    world = run.world
    first, second = conflicts(trace)
    a, b = trace.event[first], trace.event[second]
    known = run.clock[world.block[b], world.rank[a]] >= world.place[a]
    bad = np.flatnonzero((world.rank[a] != world.rank[b]) & ~known)
    if len(bad):
        i = bad[np.argmin(run.when[b[bad]])]
        _report(run, trace, first[i], second[i])


def _report(run: Run, trace: Trace, first: int, second: int) -> None:
    world, a, b = run.world, trace.event[first], trace.event[second]
    piece = trace.piece(trace.cell[first])
    verb = ["reads", "writes"]
    does = [f"{verb[int(trace.write[i])]} {piece}" for i in (first, second)]
    text = f"race: {trace.who(a)}, {does[0]} and {trace.who(b)}, {does[1]}: nothing orders them"
    for i, user, other in ((0, b, a), (1, a, b)):
        if world.op[user] == _CALLER:
            returned = world.call[user] > world.call[other]
            when = "when rank {} may have returned" if returned else "before rank {} has entered"
            text = f"race: {trace.who(other)}, {does[i]} {when.format(world.rank[user])}"
    raise ScheduleError(f"{trace.title}: {text}")


def check_run_ahead(run: Run) -> None:
    """Check that no rank enters call e while a peer is still in call e - 2.

    Flag lines and staging buffers exist twice, by the parity of the call: this makes them free.
    """
    world = run.world
    entries = np.flatnonzero(
        (world.op == Opcode.SIGNAL) & (world.step == ENTERED) & (world.call >= 2)
    )
    starts = np.flatnonzero(world.op == _CALLER)
    end_of = {(int(world.rank[i]), int(world.call[i])): int(world.place[i]) - 1 for i in starts}
    for event in entries:
        rank = world.rank[event]
        known = run.clock[world.block[event]]
        for peer in range(world.n):
            if peer != rank and known[peer] < end_of[peer, int(world.call[event]) - 1]:
                raise ScheduleError(
                    f"{world.title}: rank {rank} can enter a call "
                    f"while rank {peer} is two calls behind"
                )

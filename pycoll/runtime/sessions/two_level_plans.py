"""Binding the stages of a call in two levels to bytes.

`pycoll.algorithms.two_level.plans` says what the stages of each collective are. Here their places
become offsets, and large calls are cut into slices, so that the next slice is combined inside hosts
while the one before moves between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pycoll import _C, algorithms
from pycoll.algorithms.two_level import subtrees
from pycoll.algorithms.two_level.plans import PLANS
from pycoll.algorithms.two_level.stages import NONE, Hosts, Stage, TwoLevels, refined
from pycoll.runtime.calls.descriptors import TWO_LEVELS
from pycoll.runtime.calls.plans import LAYOUT_TABLE, CallSpec, message_limits
from pycoll.runtime.selection.select import select
from pycoll.runtime.selection.topology import Topology
from pycoll.schedule.ir import IN, OUT, TMP
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.schedule.lowering.compile import peer_plan, staged_slots
from pycoll.schedule.lowering.messages import message_plan
from pycoll.schedule.lowering.plan import Opcode, Plan
from pycoll.types import DType, Kind, Order, ReduceOp

LEAST_PIECE = 36 << 10  # of a slice, for each owner and host: packets do not overlap
SLICES, MOST_SLICE = 48, 4 << 20  # of a large call: what does not overlap is one slice
_LEAST_SLOT = 64  # bytes: a slot is whole cache lines
SCRATCHES = 3  # slices that are combined or under way: kBatch + 1
_ARRAYS = {IN: 0, OUT: 1, TMP: 2}
_NOTHING = algorithms.find("all_reduce", "one_shot")


@dataclass(frozen=True)
class Geometry:
    """Where places lie in a slice of a call, in elements."""

    spec: CallSpec
    column_of: tuple[int, ...]  # column that each rank owns, or -1
    # low, high: the slice: of the vector, or of each block where each rank has its own
    low: int
    high: int
    chunks: int  # chunks of the vector
    # base, step: first element of the scratch memory of this slice, and of a slot
    base: int
    step: int

    @property
    def in_blocks(self) -> bool:
        """Whether a chunk is the block of a rank."""
        return in_blocks(self.spec)

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths of the chunks of a vector that is not in blocks."""
        columns = max(self.column_of) + 1
        starts, lengths = cut(self.low, self.high, columns)
        share = self.chunks // columns
        inner = [cut(a, a + b, share) for a, b in zip(starts, lengths, strict=True)]
        return np.concatenate([a for a, _ in inner]), np.concatenate([b for _, b in inner])

    def table(self, stage: Stage, ends: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and lengths ``[rows, chunks]`` of the source or the target of a stage."""
        places = (stage.gives if ends == "source" else stage.takes)[list(rows)]
        offset, length = np.zeros(places.shape, np.uint64), np.zeros(places.shape, np.uint64)
        for i, rank in enumerate(rows):
            there = np.flatnonzero(places[i] != NONE)
            found = self._locate(getattr(stage, ends)[rank], rank, places[i, there])
            offset[i, there], length[i, there] = found
        return offset, length

    def _locate(self, buffer: Any, rank: int, places: np.ndarray) -> tuple[Any, Any]:
        if not self.in_blocks:
            starts, lengths = self.parts
            if buffer != TMP:
                return starts[places], lengths[places]
            share = self.chunks // (max(self.column_of) + 1)
            first = self.column_of[rank] * share
            part, place = np.divmod(places, share)  # a vector behind the other, of this column
            offset = starts[first + place] - starts[first]
            return self.base + part * self.step + offset, lengths[first + place]
        block = self.spec.count // len(self.column_of)
        length = np.full(len(places), self.high - self.low)
        if buffer == TMP:
            return self.base + places * self.step, length
        promise = COLLECTIVES[self.spec.collective]
        layout = promise.in_layout if buffer == IN else promise.out_layout
        first = places - rank if layout == OWN else places
        return first * block + self.low, length


def in_blocks(spec: CallSpec) -> bool:
    """Whether every rank, or pair of ranks, of a call has a block of the vector."""
    promise = COLLECTIVES[spec.collective]
    return promise.transposes or OWN in (promise.in_layout, promise.out_layout)


def cut(low: int, high: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a range evenly, at whole cache lines of the largest element; offsets and lengths."""
    share = -(-(int(high) - int(low)) // parts)
    share = -(-share // 64) * 64
    starts = np.minimum(int(low) + share * np.arange(parts), int(high))
    return starts, np.diff(starts, append=int(high))


def slices_of(spec: CallSpec, hosts: Hosts) -> Iterator[tuple[int, int]]:
    """Cut a vector, or the block of each rank, into slices."""
    blocks = hosts.n if in_blocks(spec) else 1
    pieces = max(blocks, hosts.columns * (hosts.count if hosts.count > 2 else 1))
    nbytes = min(spec.count * spec.itemsize // SLICES, MOST_SLICE)
    count = spec.count // blocks
    step = max(1, max(nbytes, pieces * LEAST_PIECE) // (spec.itemsize * blocks))
    step = -(-step // 64) * 64
    yield 0, min(step, count)
    for low in range(step, count, step):
        yield low, min(count, low + step)


@dataclass
class Binder:
    """Binds the stages of calls on one rank."""

    topology: Topology
    node: _C.Engine  # engine of the ranks of this host
    flat: _C.MessageEngine  # engine of all ranks
    cell_bytes: int  # of a rank, in the memory of its host
    _plans: dict = field(default_factory=dict)
    _fit: dict = field(default_factory=dict)

    def staged(self, spec: CallSpec) -> _C.StagedCall | None:
        """Bind all there is to do for a call; None, on every rank, if a host has no room for it."""
        topology = self.topology
        n, nbytes = len(topology.hosts), spec.count * spec.itemsize
        hosts = Hosts(topology.hosts, topology.columns(spec.collective, nbytes), spec.root)
        ranges = list(slices_of(spec, hosts))
        widest = max(high - low for low, high in ranges)
        plan = self._plan(spec, hosts, widest * (n if in_blocks(spec) else 1))
        if not self._fits(plan):
            return None
        compiled = self._compile(plan)
        column_of = tuple(
            place if (place := hosts.ordered[h].index(r)) < hosts.columns else NONE
            for r, h in enumerate(hosts.of)
        )
        step = widest if in_blocks(spec) else widest // hosts.columns + 64
        step = -(-step // 64) * 64 if plan.slots else 0
        share = 1 if in_blocks(spec) else plan.chunks // hosts.columns
        room = -(-plan.slots // share) * step
        made = []
        for i, (low, high) in enumerate(ranges):
            base = i % SCRATCHES * room
            geometry = Geometry(spec, column_of, low, high, plan.chunks, base, step)
            made.append(self._slice(plan, compiled, geometry))
        scratch = min(len(ranges), SCRATCHES) * room * spec.itemsize
        return _C.StagedCall(made, scratch, hosts_first=True)

    def _plan(self, spec: CallSpec, hosts: Hosts, count: int) -> TwoLevels:
        """Return the stages of calls on so many elements."""
        if self.topology.by_subtrees(spec):
            return subtrees.all_reduce(hosts)
        choice = _between(spec, hosts, count)
        params = {"root": hosts.of[spec.root]} if "root" in choice.algorithm.params else {}
        return PLANS[spec.collective](hosts, choice.algorithm, {**choice.params, **params})

    def by_messages(self, call: _C.BoundCall, word: int, count: int) -> _C.StagedCall:
        """Let a call of all ranks go by messages, once those of a host are known to agree."""
        nothing = None, 0, 1
        stages = (self.meeting(word, count), 0, 1), (call, 0, 1), nothing, nothing
        return _C.StagedCall([stages], 0, hosts_first=False)

    def _fits(self, plan: TwoLevels) -> bool:
        """Tell whether every host can run its stages: what one could not, others would wait for."""
        inside = [stage for stage in (plan.before, plan.between, plan.after) if stage is not None]
        return all(self._has_room(stage, team) for stage in inside for team in stage.teams)

    def _has_room(self, stage: Stage, team: tuple[int, ...]) -> bool:
        algorithm = stage.algorithm_of(team)
        key = algorithm, tuple(sorted(stage.params.items())), stage.share, len(team)
        if key not in self._fit:
            schedule = refined(algorithm, stage.share).schedule(len(team), **stage.params)
            slots = staged_slots(schedule)
            self._fit[key] = slots is not None and slots * _LEAST_SLOT <= self.cell_bytes
        found: bool = self._fit[key]
        return found

    def _compile(self, plan: TwoLevels) -> dict[str, Any]:
        names = ("before", "across", "between", "after")
        return {name: self._stage_plan(getattr(plan, name), name == "across") for name in names}

    def _stage_plan(self, stage: Stage | None, across: bool) -> Any:
        """Compile this rank's plan of a stage; None if it has no part."""
        rank = self.topology.rank
        team = next((t for t in stage.teams if rank in t), None) if stage else None
        if team is None:
            return None
        algorithm = stage.algorithm_of(team)
        key = (algorithm, tuple(sorted(stage.params.items())), stage.share, across and team)
        if key not in self._plans:
            schedule = refined(algorithm, stage.share).schedule(len(team), **stage.params)
            place = team.index(rank)
            if across:
                plan = _moved(message_plan(schedule, place), team)
                compiled = _compiled(plan, len(self.topology.hosts), rank)
                self._plans[key] = compiled, plan, message_limits(schedule, one_host=False)
            else:
                plan = peer_plan(schedule, place, direct=False)
                self._plans[key] = _compiled(plan, len(team), place), plan, None
        return (*self._plans[key], team)

    def _slice(self, plan: TwoLevels, compiled: dict[str, Any], geometry: Geometry) -> list:
        rank, stages = self.topology.rank, []
        for name, found in compiled.items():
            if found is None:
                stages.append((None, 0, 1))
                continue
            stage = getattr(plan, name)
            call = self._bind(stage, geometry, *found)
            stages.append((call, _ARRAYS[stage.source[rank]], _ARRAYS[stage.target[rank]]))
        return stages

    def _bind(
        self,
        stage: Stage,
        geometry: Geometry,
        compiled: Any,
        plan: Plan,
        limits: dict[str, int] | None,
        team: tuple,
    ) -> _C.BoundCall:
        """Bind a stage; `limits` are of one that sends messages."""
        spec, n = geometry.spec, len(self.topology.hosts)
        width = plan.schedule.chunks
        tables = [t for e in ("source", "target") for t in geometry.table(stage, e, team)]
        tables = [t[:, :width] for t in tables]
        if limits is None:
            return self.node.bind(compiled, **_numbers(spec, tables, 0, False))
        rows = [np.zeros((n, width), np.uint64) for _ in tables]
        for whole, part in zip(rows, tables, strict=True):
            whole[list(team)] = part
        average = spec.op == ReduceOp.AVG and COLLECTIVES[spec.collective].reduces
        at_exit = average and not plan.scales_in_fold
        return self.flat.bind_messages(
            compiled,
            **limits,
            agree=COLLECTIVES[spec.collective].one_way,
            team=list(team),
            **_numbers(spec, rows, n if average else 0, at_exit),
        )

    def meeting(self, word: int, count: int) -> _C.BoundCall:
        """Bind a call that moves nothing, but shows that a host's ranks are in the same call."""
        mates = self.topology.mates
        n, place = len(mates), mates.index(self.topology.rank)
        plan = peer_plan(_NOTHING.schedule(n), place, direct=False)
        spec = CallSpec(Kind.BARRIER, "", _NOTHING, (), False, DType.UINT8, 1, count)
        zero = [np.zeros((n, 1), np.uint64)] * 4
        numbers = _numbers(spec, zero, 0, False) | {"descriptor": word}
        return self.node.bind(_compiled(plan, n, place), **numbers)


def _between(spec: CallSpec, hosts: Hosts, nbytes: int) -> Any:
    """Choose the algorithm between hosts: what ranks that are alone on theirs would take."""
    reduces = COLLECTIVES[spec.collective].reduces
    return select(
        spec.collective,
        nbytes * spec.itemsize // hosts.columns,
        hosts.count,
        order=("any" if spec.order == Order.ANY else "tree") if reduces else None,
        dtype=DType(spec.dtype) if reduces else None,
        op=spec.op,
        messages=True,
    )


def _numbers(
    spec: CallSpec, tables: Sequence[np.ndarray], scale_n: int, at_exit: bool
) -> dict[str, object]:
    average = spec.op == ReduceOp.AVG and not scale_n
    word = spec.descriptor(TWO_LEVELS, False)
    return {
        "dtype": spec.dtype,
        "op": ReduceOp.SUM if average else spec.op,
        "itemsize": spec.itemsize,
        "count": spec.count,
        "chunk": 0,
        "layout_in": LAYOUT_TABLE,
        "layout_out": LAYOUT_TABLE,
        "descriptor": word,
        "scale_n": scale_n,
        "scale_at_exit": at_exit,
        "extents": tuple(np.ascontiguousarray(t) for t in tables),
    }


def _moved(plan: Plan, team: Sequence[int]) -> Plan:
    """Let the ranks of a team run a plan that was made for ranks from 0 on."""
    places = np.array(team)
    code, operands = plan.code.copy(), plan.operands.copy()
    message = np.isin(code["op"], (Opcode.SEND, Opcode.RECV))
    code["peer"][message] = places[code["peer"][message]]
    operands["rank"] = places[operands["rank"]]
    return Plan(plan.schedule, plan.rank, code, operands, plan.slots, False, messages=True)


def _compiled(plan: Plan, n: int, rank: int) -> _C.Plan:
    chunks = plan.schedule.chunks
    code, operands = plan.code.tobytes(), plan.operands.tobytes()
    return _C.Plan(code, operands, n, rank, chunks, plan.slots, plan.rounds, False, plan.messages)

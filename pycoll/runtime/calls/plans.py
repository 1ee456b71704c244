"""From a choice of algorithm to something the engine can run: compiled plans, bound to sizes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from pycoll import _C
from pycoll.algorithms import ALGORITHMS
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.layouts import ChunkLayout, blocks_apart, blocks_in_chunks
from pycoll.runtime.calls.descriptors import (
    FLAG_DIRECT,
    FLAG_INPUT,
    FLAG_READ,
    algorithm_number,
    descriptor,
)
from pycoll.runtime.calls.plan_room import PlanRoom
from pycoll.runtime.selection.tuning_table import World
from pycoll.runtime.sessions.reports import raising
from pycoll.schedule.ir import Algorithm, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES, OWN, Collective
from pycoll.schedule.lowering.compile import peer_plan
from pycoll.schedule.lowering.extent import extent_of
from pycoll.schedule.lowering.messages import message_plan
from pycoll.schedule.lowering.plan import Plan
from pycoll.types import DType, Kind, Order, ReduceOp

LAYOUT_FULL, LAYOUT_OWN, LAYOUT_TABLE = 0, 1, 2
_Bound = TypeVar("_Bound")
_Places = ChunkLayout | np.ndarray | None
_MAX_BINDINGS = 1024
_LINE_BYTES = 64


def compile_plans(
    spec: CallSpec, world_size: int, ranks: Sequence[int], messages: bool = False
) -> tuple[list[Plan], int]:
    """Compile the plans of some ranks.

    Algorithms of the registry are proven there; of any other, the very plans proven here are run.

    Returns:
        The plans, and the number that stands for the algorithm.

    Raises:
        ScheduleError: If the proof fails, naming schedule, mode, rank, round and piece.
    """
    schedule = spec.algorithm.schedule(world_size, **dict(spec.params))
    in_place = spec.direct and not spec.input_only and spec.algorithm.in_place
    code = None
    if spec.algorithm not in ALGORITHMS:
        from pycoll.schedule.proof.verify import proven  # takes long to import

        memory = f"{'direct' if spec.direct else 'staged'}{', in place' if in_place else ''}"
        made = proven(schedule)[1]
        everybody = made["messages" if messages else memory]  # numbered alike on every rank
        own = made["messages, apart"] if spec.apart else everybody
        plans = [own[rank] for rank in ranks]
        code = 2 * schedule.chunks + schedule.reduces_at_once
        for plan in everybody:
            code = zlib.crc32(int(plan.slots).to_bytes(8, "little"), code)
            code = zlib.crc32(plan.operands.tobytes(), zlib.crc32(plan.code.tobytes(), code))
    elif messages:
        plans = [message_plan(schedule, rank, apart=spec.apart) for rank in ranks]
    else:
        plans = [peer_plan(schedule, r, direct=spec.direct, in_place=in_place) for r in ranks]
    return plans, algorithm_number(spec.algorithm, dict(spec.params), code)


@dataclass(frozen=True)
class CallSpec:
    """What one call does, apart from where its arrays are."""

    kind: Kind
    collective: str  # name of the collective whose schedule it runs
    algorithm: Algorithm
    params: tuple[tuple[str, Any], ...]  # its parameters, as sorted pairs
    direct: bool  # peers access the users' arrays themselves
    dtype: int  # code of the element type that the engine works with
    itemsize: int
    count: int  # elements of the full vector
    op: ReduceOp = ReduceOp.SUM
    order: Order = Order.ANY
    root: int = 0  # root rank, or 0
    caller_code: int | None = None  # code of the caller's element type where it is another one
    input_only: bool = False  # peers access the users' inputs only; results may lie anywhere
    # over messages: input and result share no memory on this rank, and it reduces
    apart: bool = False
    # checksum of what all ranks must have been given alike, and which no peer is asked for
    agreed: int = 0
    across: bool = False  # peers read the users' arrays, which are private, through the kernel
    # the same call across; it runs instead where that is faster
    alternative: CallSpec | None = None

    def descriptor(self, algorithm: int, direct: bool) -> int:
        """Return what all ranks of the call must agree on."""
        dtype = self.dtype if self.caller_code is None else self.caller_code
        flags = self.order | (FLAG_DIRECT if direct else 0)
        flags |= FLAG_READ if self.across or self.alternative else 0
        flags |= FLAG_INPUT if self.input_only else 0
        return descriptor(self.kind, dtype, self.op, flags, self.root, algorithm)


def barrier_spec(algorithm: Algorithm) -> CallSpec:
    """Return the call that moves nothing and makes every rank wait for every other."""
    return CallSpec(Kind.BARRIER, "all_reduce", algorithm, (), False, int(DType.UINT8), 1, 0)


@dataclass
class PlanCache:
    """Compiled and bound plans of one communicator."""

    engine: Any
    rank: int
    world_size: int
    messages: bool = False  # ranks send messages; otherwise they share memory
    one_host: bool = True
    copied_bytes: int = 0  # messages below so many are copied by the transport, on one host
    crowded: bool = False  # those of a machine outnumber the cores that they may use
    world: World | None = None  # what was measured with ranks in these places, or None
    single_copy: bool = False  # calls may have alternatives that read private arrays
    _room: PlanRoom = field(init=False)
    _calls: dict = field(default_factory=dict)
    _plans: dict = field(default_factory=dict)
    _bindings: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look at the memory that there is for compiling."""
        self._room = PlanRoom(1 if self.messages else self.world_size)

    @property
    def barrier_algorithm(self) -> str:
        """Name of the all-reduce that a barrier runs on no elements."""
        return "recursive_doubling" if self.messages else "one_shot"

    def use(self, world: World | None, crowded: bool) -> None:
        """Let these choose from now on."""
        self.world, self.crowded = world, crowded
        self._calls.clear()

    def known(self, key: tuple[Any, ...], make: Callable[[], _Bound]) -> _Bound:
        """Return what was made for such a call before, or make it."""
        found = self._calls.get(key)
        if found is None:
            found = make()
            if len(self._calls) >= _MAX_BINDINGS:
                self._calls.clear()
            self._calls[key] = found
        return found

    def bind(self, spec: CallSpec, extents: _Places = None) -> _C.BoundCall:
        """Return the binding of a call, whose chunks may lie elsewhere; compile its plan once."""
        if spec.alternative and not self.single_copy:
            spec = replace(spec, alternative=None)
        if extents is not None:
            return self._make(spec, extents)
        found = self._bindings.get(spec)
        if found is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
                self._plans.clear()
            found = self._bindings[spec] = self._make(spec, None)
        return found

    def _plan(self, spec: CallSpec) -> tuple[_C.Plan, bool, int, dict[str, int], int]:
        where = spec.direct, spec.input_only, spec.apart
        key = spec.collective, spec.algorithm, spec.params, *where
        found = self._plans.get(key)  # kept at hand: all may be forgotten meanwhile
        if found is None:
            schedule = spec.algorithm.schedule(self.world_size, **dict(spec.params))
            self._room.check(schedule, self.rank)
            (plan,), number = compile_plans(spec, self.world_size, [self.rank], self.messages)
            compiled = raising(
                _C.Plan,
                plan.code.tobytes(),
                plan.operands.tobytes(),
                self.world_size,
                self.rank,
                plan.schedule.chunks,
                plan.slots,
                plan.rounds,
                plan.direct,
                plan.messages,
            )
            limits = message_limits(plan.schedule, self.one_host)
            found = compiled, plan.scales_in_fold, plan.schedule.chunks, limits, number
            self._plans[key] = found
        return found

    def _make(self, spec: CallSpec, extents: _Places) -> _C.BoundCall:
        promise = COLLECTIVES[spec.collective]
        if spec.root and promise.rooted and "root" not in spec.algorithm.params:
            name = spec.algorithm.name
            raise ArgumentError(f"root={spec.root}: {name} has no parameter root, so it is rank 0")
        plan, scales_in_fold, chunks, limits, number = self._plan(spec)
        numbers = binding_numbers(spec, self.world_size, chunks, scales_in_fold, number)
        if self.one_host and self.copied_bytes:
            limits = limits | copied_limits(spec, numbers["chunk"], self.copied_bytes)
        places, blocks = extents, (spec.count, self.world_size, chunks, promise)
        if extents is None:
            places = blocks_in_chunks(*blocks)
        elif not isinstance(extents, ChunkLayout):
            places = blocks_apart(*blocks, extents)
        if places:
            numbers |= {"layout_in": LAYOUT_TABLE, "layout_out": LAYOUT_TABLE}
        if spec.across or spec.alternative:
            other = spec.alternative and self._make(spec.alternative, extents)
            numbers |= {"across": spec.across, "alternative": other}
        if spec.input_only:
            numbers |= {"input_only": True}
        return raising(
            self._bind_of(promise, limits),
            plan,
            **numbers,
            extents=(
                (places.in_offset, places.in_length, places.out_offset, places.out_length)
                if places
                else None
            ),
        )

    def _bind_of(self, promise: Collective, limits: dict[str, int]) -> Callable[..., _C.BoundCall]:
        if not self.messages:
            return self.engine.bind
        agree = promise.one_way  # elsewhere what a rank gets depends on all ranks anyway
        return functools.partial(self.engine.bind_messages, **limits, agree=agree, team=[])


def binding_numbers(
    spec: CallSpec, world_size: int, chunks: int, scales_in_fold: bool, number: int
) -> dict[str, int]:
    """Return the numbers that bind a plan to a call: what turns chunks into bytes."""
    promise = COLLECTIVES[spec.collective]
    average = spec.op == ReduceOp.AVG and promise.reduces
    return {
        "dtype": spec.dtype,
        "op": spec.op,
        "itemsize": spec.itemsize,
        "count": spec.count,
        "chunk": _chunk(spec, promise, chunks),
        "layout_in": _layout(promise.in_layout),
        "layout_out": _layout(promise.out_layout),
        "descriptor": spec.descriptor(number, spec.direct),
        "check": number >> 16 ^ spec.agreed,
        "scale_n": world_size if average else 0,
        "scale_at_exit": average and not scales_in_fold,
    }


def _chunk(spec: CallSpec, promise: Collective, chunks: int) -> int:
    """Elements of a chunk: an equal share, in whole cache lines where shares may differ."""
    chunks = max(1, chunks)
    share = -(-spec.count // chunks)
    if OWN in (promise.in_layout, promise.out_layout) or promise.transposes:
        return share
    line = max(1, _LINE_BYTES // spec.itemsize)
    return -(-share // line) * line


def _layout(layout: str) -> int:
    return LAYOUT_OWN if layout == OWN else LAYOUT_FULL


_SEGMENT_BYTES = 4 << 20  # of a chunk that one message carries
_WHOLE_BYTES = 1 << 30  # likewise, where no fold and no other message could begin earlier
_LINK_BYTES = 60 << 10
"""Likewise between hosts. Over TCP, Open MPI sends 64 KiB at once; before more it shakes hands, and
each word of that queues behind the data that goes the other way."""
_EAGER_BYTES = 3584  # of a message that is copied into a packet: both fit Open MPI's 4 KiB
_COPIED_MESSAGES = 4  # of the largest that is copied: a chunk up to here is sent in such messages
LINK_EAGER_BYTES = 32 << 10  # likewise between hosts, where to agree first costs a round trip


def message_limits(schedule: Schedule, one_host: bool) -> dict[str, int]:
    """Return how messages are cut: the same on every rank, as it follows from the schedule.

    A segment is what one message carries of a chunk; a message that fits a packet is copied.
    """
    extent = extent_of(schedule)
    segment, eager = _LINK_BYTES, LINK_EAGER_BYTES
    if one_host:
        moves = not COLLECTIVES[schedule.collective].reduces
        segment = _WHOLE_BYTES if moves and schedule.one_hop else _SEGMENT_BYTES
        eager = _EAGER_BYTES
    sizes = {"segment_bytes": segment, "eager_bytes": eager}
    return sizes | {"message_chunks": extent.message, "slots": extent.slots}


def copied_limits(spec: CallSpec, chunk: int, copied_bytes: int) -> dict[str, int]:
    """Return limits for chunks of so many elements where the transport copies small messages.

    It reads larger ones from their sender, in a call of the system each. Where all ranks do so at
    once, up to 32 KiB take longer than in messages that are copied one behind the other. Where one
    sends and one receives it depends on the place of their cores which way is faster.
    """
    limits = {"eager_bytes": copied_bytes - _LINE_BYTES}  # a packet has a head
    if spec.collective == "all_reduce" and chunk * spec.itemsize <= _COPIED_MESSAGES * copied_bytes:
        limits["segment_bytes"] = copied_bytes // 2
    return limits

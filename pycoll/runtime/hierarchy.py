"""All-reduce in two levels: shared memory inside hosts, messages between them.

The vector is cut into one part for each *column*. Inside every host the owner of a column
combines its part of all local inputs; owners of the same column combine across hosts with
messages; inside every host all ranks fetch the parts. Every host sends what an all-reduce among
hosts alone would send, however many ranks it has, and hosts may have different numbers of ranks.

Reduction order: hosts hold consecutive ranks here, so partial results combine neighbours only. That
gives the in-order tree where hosts have 2, 4, 8, ... ranks each, and any order where order makes no
difference (integers, and minimum and maximum). All else goes by messages between all ranks.

Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect: decomposing all-reduce for deep
learning on heterogeneous network hierarchy", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pycoll import _C, algorithms
from pycoll.runtime.plans import LAYOUT_TABLE, SEGMENT_BYTES, TWO_LEVELS, CallSpec, descriptor
from pycoll.schedule.compile import peer_plan
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.messages import message_plan
from pycoll.schedule.plan import Opcode, Plan
from pycoll.types import DType, Kind, Order, ReduceOp

SLICE_BYTES = 2 << 20
ONE_COLUMN_BYTES = 64 << 10
_EXACT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
_FEW_BYTES = 4 << 10
_NOTHING = algorithms.find("all_reduce", "one_shot")


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a communicator are.

    Attributes:
        hosts: Number of the host of each rank, counted from 0 in rank order.
        rank: This rank.
    """

    hosts: tuple[int, ...]
    rank: int

    @property
    def groups(self) -> list[list[int]]:
        """Ranks of each host."""
        count = max(self.hosts) + 1
        return [[r for r, h in enumerate(self.hosts) if h == host] for host in range(count)]

    @property
    def mates(self) -> list[int]:
        """Ranks of this host."""
        return self.groups[self.hosts[self.rank]]

    @property
    def useful(self) -> bool:
        """Whether there are two levels: several hosts of consecutive ranks, one with several."""
        in_order = list(self.hosts) == sorted(self.hosts)
        return in_order and 1 < max(self.hosts) + 1 < len(self.hosts)

    @property
    def nests(self) -> bool:
        """Whether trees inside hosts are parts of the tree over all ranks."""
        sizes = {len(group) for group in self.groups}
        return len(sizes) == 1 and next(iter(sizes)).bit_count() == 1

    def gives(self, spec: CallSpec) -> bool:
        """Whether a call can go in two levels with the bits of one level."""
        if not self.useful or spec.kind != Kind.ALL_REDUCE:
            return False
        dtype = DType(spec.dtype)
        if spec.op in _EXACT or not dtype.is_float or spec.order == Order.ANY:
            return True
        return spec.order == Order.TREE and self.nests and not dtype.rounds_once

    def columns(self, nbytes: int) -> int:
        """Into how many parts the vector is cut: one owner in each host for each."""
        return 1 if nbytes <= ONE_COLUMN_BYTES else min(len(group) for group in self.groups)


@dataclass(frozen=True)
class Slice:
    """The bound calls of a part of the vector.

    Attributes:
        scatter: Combines inside the host; on every rank.
        across: Combines between hosts; None on ranks that own no column.
        gather: Fetches inside the host.
    """

    scatter: _C.BoundCall
    across: _C.BoundCall | None
    gather: _C.BoundCall


def slices(topology: Topology, node: _C.Engine, flat: _C.MpiEngine, spec: CallSpec) -> list[Slice]:
    """Bind all there is to do for a call, in order."""
    return [_bind(topology, node, flat, spec, low, high) for low, high in _cut(spec)]


def meeting(topology: Topology, node: _C.Engine, word: int, count: int) -> _C.BoundCall:
    """Bind a call that moves nothing, but shows that the ranks of a host are in the same call."""
    mates = topology.mates
    n, place = len(mates), mates.index(topology.rank)
    plan = peer_plan(algorithms.find("all_reduce", "one_shot").schedule(n), place, direct=False)
    spec = CallSpec(Kind.BARRIER, "", _NOTHING, (), False, DType.UINT8, 1, count)
    zero = np.zeros(1, np.uint64)
    numbers = _numbers(spec, _tables(zero, zero, n), 0, False) | {"descriptor": word}
    return node.bind(_compiled(plan, n, place), **numbers)


def _cut(spec: CallSpec) -> Iterator[tuple[int, int]]:
    step = max(1, SLICE_BYTES // spec.itemsize)
    if spec.count <= step:
        yield 0, spec.count
        return
    for low in range(0, spec.count, step):
        yield low, min(spec.count, low + step)


def _parts(low: int, high: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a range evenly, at whole cache lines of the largest element; offsets and lengths."""
    share = -(-(high - low) // parts)
    share = -(-share // 64) * 64
    starts = np.minimum(low + share * np.arange(parts), high)
    return starts.astype(np.uint64), np.diff(starts, append=high).astype(np.uint64)


def _bind(
    topology: Topology,
    node: _C.Engine,
    flat: _C.MpiEngine,
    spec: CallSpec,
    low: int,
    high: int,
) -> Slice:
    columns = topology.columns(spec.count * spec.itemsize)
    starts, lengths = _parts(low, high, columns)
    mates = topology.mates
    place = mates.index(topology.rank)
    idle = (0, len(mates) - columns)
    local = np.pad(starts, idle), np.pad(lengths, idle)
    order = "_rank" if spec.order == Order.RANK else ""
    scatter = _inside(node, spec, "reduce_scatter", "direct" + order, local, len(mates), place)
    gather = _inside(node, spec, "all_gather", "direct_pull", local, len(mates), place)
    across = None
    if place < columns:
        team = [group[place] for group in topology.groups]
        part = int(starts[place]), int(starts[place] + lengths[place])
        across = _across(flat, spec, topology, team, part)
    return Slice(scatter, across, gather)


def _word(spec: CallSpec) -> int:
    return descriptor(spec.kind, spec.dtype, spec.op, spec.order, False, 0, TWO_LEVELS)


def _tables(offset: np.ndarray, length: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
    """Give every rank the same offsets and lengths, for input and for output."""
    pair = [np.broadcast_to(a, (rows, len(a))) for a in (offset, length)]
    return (*pair, *pair)


def _inside(
    node: _C.Engine,
    spec: CallSpec,
    collective: str,
    name: str,
    local: tuple[np.ndarray, np.ndarray],
    n: int,
    place: int,
) -> _C.BoundCall:
    schedule = algorithms.find(collective, name).schedule(n)
    plan = peer_plan(schedule, place, direct=False)
    return node.bind(_compiled(plan, n, place), **_numbers(spec, _tables(*local, n), 0, False))


def _numbers(
    spec: CallSpec, tables: tuple[np.ndarray, ...], scale_n: int, at_exit: bool
) -> dict[str, object]:
    average = spec.op == ReduceOp.AVG and not scale_n
    return {
        "dtype": spec.dtype,
        "op": ReduceOp.SUM if average else spec.op,
        "itemsize": spec.itemsize,
        "count": spec.count,
        "chunk": 0,
        "layout_in": LAYOUT_TABLE,
        "layout_out": LAYOUT_TABLE,
        "descriptor": _word(spec),
        "scale_n": scale_n,
        "scale_at_exit": at_exit,
        "extents": tables,
    }


def _across(
    flat: _C.MpiEngine, spec: CallSpec, topology: Topology, team: Sequence[int], part: tuple
) -> _C.BoundCall:
    n, width = len(topology.hosts), len(team)
    algorithm = _algorithm(width, (part[1] - part[0]) * spec.itemsize, spec.order)
    schedule = algorithm.schedule(width)
    plan = message_plan(schedule, team.index(topology.rank))
    offset, length = _parts(*part, schedule.chunks)
    scale_n = n if spec.op == ReduceOp.AVG else 0
    at_exit = bool(scale_n) and not plan.scales_in_fold
    numbers = _numbers(spec, _tables(offset, length, n), scale_n, at_exit)
    compiled = _compiled(_moved(plan, team), n, topology.rank)
    return flat.bind_messages(
        compiled, segment_bytes=SEGMENT_BYTES, agree=False, team=list(team), **numbers
    )


def _algorithm(width: int, nbytes: int, order: Order) -> Algorithm:
    """Choose for hosts what the selector would; all of these work in place."""
    suffix = "_rank" if order == Order.RANK else ""
    if width > 16 and not suffix:
        return algorithms.find("all_reduce", "halving_doubling")
    name = "one_shot" if nbytes <= _FEW_BYTES and width <= 4 else "two_shot_pull"
    return algorithms.find("all_reduce", name + suffix)


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

"""Which algorithm a call uses: the first line of a table that fits, the same on every rank.

The choice is a pure function of what all ranks of a call have in common. It never changes the
reduction order that was asked for: what cannot give it is not eligible, and a named algorithm that
cannot give it is an error. Lines that ``pycoll tune`` has measured come before the built-in ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from pycoll.algorithms import ALGORITHMS, find, names
from pycoll.errors import ArgumentError, ScheduleError, kind_of
from pycoll.runtime.selection.rules import FEW_N, LINK_RULES, ONE_HOST_RULES, RULES, Rule
from pycoll.runtime.selection.tuning_table import TunedRule, World
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.schedule.ir import Algorithm, Buffer, Schedule
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.schedule.lowering.table import remote_buffers
from pycoll.types import DType, Order, ReduceOp

MAX_BLOCKS = 64
STAGE_BELOW = 4 << 10
"""A named algorithm stages vectors up to this size: that costs one synchronisation less."""

_USUAL = Machine()


MOVE_BELOW = 256 << 10
"""Larger calls that only move data into private results go as ordinary arrays do: there the kernel
copies as fast as the memory is."""


@dataclass(frozen=True)
class SelectionRequest:
    """What a call asks for, all of it the same on every rank."""

    collective: str
    nbytes: int  # size of the full vector
    n: int
    order: str  # reduction order; ``""`` when nothing is reduced
    dtype: DType | None = None  # element type, or None when it does not matter
    op: ReduceOp = ReduceOp.SUM
    direct: bool = False  # all arrays lie in symmetric memory
    input_only: bool = False  # only the inputs do
    in_place: bool = True  # a direct plan has to work when input and output are the same memory
    messages: bool = False  # ranks send messages; otherwise they share memory
    one_host: bool = False  # all ranks are on one host; matters where they send messages
    crowded: bool = False  # ranks of a machine outnumber the cores that they may use

    def obstacle(self, algorithm: Algorithm) -> str:
        """Say why an algorithm cannot serve; empty if it can."""
        if not algorithm.works_for(self.n):
            return f"not defined for {self.n} ranks"
        if self.order not in ("tree", "rank"):
            return ""
        if algorithm.order != self.order:
            return f"gives order {algorithm.order}, not {self.order}"
        rounds_once = self.dtype is not None and self.dtype.rounds_once
        if rounds_once and self.op.rounds and not folds_at_once(algorithm, self.n):
            return f"rounds {self.dtype.name.lower()} at every hop, not once"
        if rounds_once and self.op == ReduceOp.AVG and not divides_at_once(algorithm, self.n):
            return f"rounds {self.dtype.name.lower()} before it divides by the number of ranks"
        return ""

    def may_be_direct(self, algorithm: Algorithm) -> bool:
        """Whether peers may work on the arrays of this call themselves."""
        if self.input_only:
            small = self.nbytes <= MOVE_BELOW or COLLECTIVES[self.collective].reduces
            return small and only_reads(algorithm, self.n)
        return self.direct and (algorithm.in_place or not self.in_place)

    def fits(self, rule: Rule) -> bool:
        """Whether a line of the table is about this call."""
        return (
            rule.collective == self.collective
            and self.n <= rule.max_n
            and self.nbytes <= rule.max_bytes
            and (self.direct or self.input_only or not rule.direct)
            and (self.crowded or not rule.crowded)
        )


@lru_cache(1024)
def folds_at_once(algorithm: Algorithm, n: int) -> bool:
    """Whether every reduction of a result happens in one fold of all its contributions."""
    if n <= 2:
        return True
    schedule = algorithm.schedule(n)
    folds = [f for group in schedule.rounds(schedule.all_ranks()) for f in group if f.happens]
    if COLLECTIVES[algorithm.collective].prefix is None:
        return all(len(f.srcs) in (1, n) for f in folds)
    return all(p.buffer == Buffer.IN for f in folds if len(f.srcs) > 1 for p in f.srcs)


@lru_cache(1024)
def divides_at_once(algorithm: Algorithm, n: int) -> bool:
    """Whether a mean is divided in the fold that sums it, before it is rounded."""
    return algorithm.schedule(n).reduces_at_once


@lru_cache(1024)
def only_reads(algorithm: Algorithm, n: int) -> bool:
    """Whether ranks read each other's inputs and never touch each other's results."""
    return not remote_buffers(algorithm.schedule(n)) & {Buffer.OUT, Buffer.ACC}


def working_dtype(collective: str, n: int, dtype: DType, op: ReduceOp, order: str | None) -> DType:
    """Return the element type that the schedule of a reduction works on.

    A prefix reduction of 8 or 16 bits over many ranks is made in float32 and rounded at the end.
    Otherwise every rank would need the inputs of all below it, to round each result once.
    """
    wide = COLLECTIVES[collective].prefix is not None and dtype.rounds_once and op.rounds
    return DType.FLOAT32 if wide and n > FEW_N and order != "any" else dtype


@dataclass(frozen=True)
class Choice:
    """The algorithm of a call."""

    algorithm: Algorithm
    params: dict[str, Any] = field(hash=False)  # its parameters, the root apart
    direct: bool  # peers work on the users' arrays; otherwise the arrays are staged
    order: str  # reduction order that the result has; ``""`` when nothing is reduced
    reason: str
    request: SelectionRequest
    machine: Machine | Network  # what predictions are made for
    measured: TunedRule | None = None  # the measurement that has decided, or None

    @property
    def name(self) -> str:
        """Name of the algorithm."""
        return self.algorithm.name

    @cached_property
    def predicted_s(self) -> float:
        """Predicted time of the call, in seconds."""
        schedule = self.algorithm.schedule(self.request.n, **self.params)
        return self.machine.predict(schedule, self.request.nbytes, self.direct)


def select(
    collective: str,
    nbytes: int,
    n: int,
    *,
    order: str | None = None,
    dtype: DType | None = None,
    op: ReduceOp = ReduceOp.SUM,
    direct: bool = False,
    input_only: bool = False,
    algorithm: str | Algorithm | None = None,
    machine: Machine | Network | None = None,
    messages: bool = False,
    one_host: bool = False,
    crowded: bool = False,
    world: World | None = None,
) -> Choice:
    """Choose the algorithm of a call, described as by `SelectionRequest`.

    ``order=None`` means ``"tree"`` for a reduction, ``"rank"`` for a prefix reduction, or whatever
    the named algorithm gives.
    `machine` is for predictions, which do not decide; what was measured comes first (`world`).

    Raises:
        ArgumentError: For an unknown name, or an algorithm that does not give the order.
    """
    wanted = _order(collective, order, named=algorithm is not None)
    aliased = not COLLECTIVES[collective].transposes  # the input of those is copied first
    places = (direct, input_only, aliased, messages, one_host, crowded)
    request = SelectionRequest(collective, nbytes, n, wanted, dtype, op, *places)
    machine = machine or (Network() if messages else Machine())
    if algorithm is None:
        return _by_measurement(request, machine, world) or _by_table(request, machine)
    chosen = _named(collective, algorithm)
    return _by_name(_in_its_order(request, chosen) if order is None else request, chosen, machine)


def _order(collective: str, order: str | None, named: bool) -> str:
    """Return the order to look for: the default where none was given."""
    if collective not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ArgumentError(f"collective={collective!r} is not known; accepted: {known}")
    accepted = [o.name.lower() for o in Order]
    if order is not None and order not in accepted:
        raise ArgumentError(f"order={order!r} is not known; accepted: {', '.join(accepted)}")
    if not COLLECTIVES[collective].reduces:
        if order is not None:
            raise ArgumentError(f"order={order!r} is for reductions; {collective} reduces nothing")
        return ""
    usual = "tree" if COLLECTIVES[collective].prefix is None else "rank"
    return order or ("any" if named else usual)


def _in_its_order(request: SelectionRequest, algorithm: Algorithm) -> SelectionRequest:
    """Ask for the order that an algorithm gives, where it can give it."""
    request = replace(request, order=algorithm.order)
    if request.obstacle(replace(algorithm, worlds=lambda n: True)):
        return replace(request, order="any")
    return request


def _by_measurement(
    request: SelectionRequest, machine: Machine | Network, world: World | None
) -> Choice | None:
    if not world or request.input_only:  # that is not measured
        return None
    rule = world.rule(request.collective, request.nbytes, request.order, request.direct)
    if not rule:
        return None
    algorithm = _named(request.collective, rule.algorithm)
    if request.obstacle(algorithm):  # of this dtype or operation
        return None
    why = (
        f"`pycoll tune` measured {rule.seconds * 1e6:.3g} us where {rule.default} "
        f"took {rule.default_seconds * 1e6:.3g} us"
    )
    direct = request.may_be_direct(algorithm) and request.nbytes > STAGE_BELOW
    params = parameters(algorithm, request)
    return Choice(algorithm, params, direct, request.order, why, request, machine, rule)


def _by_table(request: SelectionRequest, machine: Machine | Network) -> Choice:
    by_messages = ONE_HOST_RULES if request.one_host else LINK_RULES
    for rule in filter(request.fits, by_messages if request.messages else RULES):
        for name in rule.names:
            algorithm = _named(request.collective, name)
            if request.obstacle(algorithm) or (
                rule.direct and not request.may_be_direct(algorithm)
            ):
                continue
            params = parameters(algorithm, request)
            return Choice(algorithm, params, rule.direct, request.order, rule.why, request, machine)
    raise ArgumentError(f"no algorithm for {request.collective} gives {_described(request)}")


def _by_name(request: SelectionRequest, algorithm: Algorithm, machine: Machine | Network) -> Choice:
    obstacle = request.obstacle(algorithm)
    if obstacle:
        able = [a.name for a in of_collective(request.collective) if not request.obstacle(a)]
        raise ArgumentError(
            f"{request.collective}: algorithm={algorithm.name!r} {_verb(obstacle)}; "
            f"{_described(request)} is given by {', '.join(able) or 'none'}"
        )
    direct = request.may_be_direct(algorithm) and request.nbytes > STAGE_BELOW
    params = parameters(algorithm, request)
    return Choice(algorithm, params, direct, request.order, "asked for by name", request, machine)


def _verb(obstacle: str) -> str:
    return f"is {obstacle}" if obstacle.startswith("not") else obstacle


def _described(request: SelectionRequest) -> str:
    dtype = f" for {request.dtype.name.lower()}" if request.dtype is not None else ""
    return (
        f"order={request.order!r}{dtype}" if request.order else "this"
    ) + f" on {request.n} ranks"


def of_collective(collective: str) -> list[Algorithm]:
    """List the algorithms of a collective, in the order of the registry."""
    return [a for a in ALGORITHMS if a.collective == collective]


def _named(collective: str, algorithm: str | Algorithm) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        if algorithm.collective == collective:
            return algorithm
        raise ArgumentError(
            f"algorithm {algorithm.name!r} computes {algorithm.collective}, not {collective}"
        )
    if not isinstance(algorithm, str):
        raise ArgumentError(
            f"algorithm={algorithm!r} is {kind_of(algorithm)}; accepted: an Algorithm of "
            f"{collective} (a function under @algorithm({collective!r})), or the name of one: "
            f"{', '.join(names(collective))}"
        )
    try:
        return find(collective, algorithm)
    except ScheduleError as error:
        raise ArgumentError(str(error)) from None


def parameters(algorithm: Algorithm, request: SelectionRequest) -> dict[str, Any]:
    """Choose the parameters of an algorithm: into how many blocks a pipeline cuts the vector.

    Made for a usual machine, not for what was measured, so that what was measured is what runs.

    A chain of d + k rounds with blocks of nbytes / k takes least time at k = sqrt(d * t / s), t
    the time to move the vector once and s that of a synchronisation; k is made a power of two, so
    that neighbouring sizes share a plan.
    """
    if "k" not in algorithm.params or algorithm not in ALGORITHMS:
        return {}
    depth = max(0, _rounds(algorithm.schedule(request.n, k=1)) - 1)
    moved = (2 * _USUAL.beta + _USUAL.gamma) * request.nbytes
    best = math.sqrt(depth * moved / (_USUAL.alpha + _USUAL.sigma))
    return {"k": 1 << round(math.log2(min(max(1.0, best), MAX_BLOCKS)))}


def _rounds(schedule: Schedule) -> int:
    """Count the rounds in which rank 0 would touch another rank's memory, masks apart."""
    return sum(
        any(piece.rank % schedule.n for f in folds for piece in (*f.srcs, *f.dsts))
        for folds in schedule.rounds(0)
    )

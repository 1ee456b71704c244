"""The language of pipeline schedules, and their lowering to one list of operations a stage.

A model is cut into *chunks* 0, 1, ..., each a run of layers; every stage of the pipeline has one
or more of them. A schedule is a short generator that says in which order a stage computes, for the
``m`` micro-batches of a step and ``p`` stages::

    @pipeline("gpipe", live=lambda stage, p, m: m)
    def gpipe(stage, p, m):
        for i in range(m):
            yield F(i)
        for i in range(m):
            yield B(i)
            yield W(i)

``F(i)`` is the forward pass of micro-batch ``i``, ``B(i)`` the gradient of its input, ``W(i)`` the
gradient of the parameters; with several chunks on a stage, ``F(i, c)`` names the c-th of them.
A schedule may also be a *rule*: a key of operations; of what a stage can do at a time, it does what
has the least key, while it holds no more activations than the schedule states (`by_rule`).
The author writes no communication. `lower` adds every SEND and RECV, the REDUCE of each chunk's
gradient, FREE where an activation is needed no more, and STEP, so that no stage can wait for one
that waits for it, even where a transfer blocks both of its ends until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from pycoll.errors import ScheduleError

COMPUTE = ("F", "B", "W")
LAYOUTS: dict[str, Callable[[int, int, int], int]] = {
    # chunk number of the c-th chunk of a stage, for p stages
    "loop": lambda stage, c, p: c * p + stage,
    "vee": lambda stage, c, p: stage if c == 0 else 2 * p - 1 - stage,
}


class Op(NamedTuple):
    """One operation of a stage.

    Attributes:
        kind: ``F``, ``B``, ``W``, ``SEND``, ``RECV``, ``REDUCE``, ``FREE`` or ``STEP``.
        micro: Number of the micro-batch, over all steps; of a ``STEP`` or ``REDUCE``, the step.
        chunk: Number of the chunk; in what a schedule yields, the number within its stage.
        what: Of ``SEND`` and ``RECV``: ``x``, the output of `chunk` on its way to the next chunk,
            or ``dx``, the gradient of its input on its way to the one before.
    """

    kind: str
    micro: int
    chunk: int = 0
    what: str = ""

    def __str__(self) -> str:
        """Name the operation: ``F(3)`` on chunk 1 is ``F3.1``."""
        return f"{self.kind}{' ' if self.what else ''}{self.what}{self.micro}.{self.chunk}"


def F(micro: int, chunk: int = 0) -> Op:
    """Return the forward pass of a micro-batch through a chunk of the stage."""
    return Op("F", micro, chunk)


def B(micro: int, chunk: int = 0) -> Op:
    """Return the backward pass of a micro-batch to the input of a chunk of the stage."""
    return Op("B", micro, chunk)


def W(micro: int, chunk: int = 0) -> Op:
    """Return the gradient of a micro-batch with respect to the parameters of a chunk."""
    return Op("W", micro, chunk)


Bound = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: in which order every stage computes.

    Attributes:
        name: What it is called.
        order: The generator: ``order(stage, p, m)`` yields `F`, `B` and `W`, for m micro-batches,
            of all steps. Or the rule.
        rule: Whether `order` is a rule: ``order(op)`` returns the key of an operation.
        live: ``live(stage, p, m)``: how many activations a stage holds at most, in units of one
            micro-batch on the layers of one whole stage.
        layout: Which chunks a stage has: ``loop`` (stage, stage + p, ...) or ``vee`` (down and up).
        chunks: Chunks of a stage.
        pad: Micro-batches for which the order is made are a multiple of this and not fewer, given
            p; operations of those that do not exist are left out.
        steps: Steps that are unrolled in a program: 1 with a flush at the end of a step.
        versions: ``versions(stage, p, m)``: versions of the parameters that a stage holds at most.
        weights: Which version a forward pass takes, a function of `Use`; None: the newest.
        age: ``age(stage, p, m)``: how many steps, of those before its own, are not in the version
            that a forward pass takes, at most.
        per_step: Micro-batches after which parameters change: ``m``, or 1 without a flush.
        least: Fewest micro-batches of a step, given p.
        bubble: ``bubble(p, m)``: time that the busiest stage waits at most, where F, B and W of a
            chunk take one unit each and transfers none. None: it is not stated.
        source: Paper and section.
    """

    name: str
    order: Callable[[int, int, int], Iterable[Op]] | Callable[[Op], tuple]
    live: Bound
    rule: bool = False
    layout: str = "loop"
    chunks: int = 1
    pad: Callable[[int], int] = lambda p: 1
    steps: int = 1
    versions: Bound = lambda stage, p, m: 1
    weights: Callable[[Use], int] | None = None
    age: Bound = lambda stage, p, m: 0
    per_step: Callable[[int], int] = lambda m: m
    least: Callable[[int], int] = lambda p: 1
    bubble: Callable[[int, int], float] | None = None
    source: str = field(default="", compare=False)

    def program(self, p: int, m: int, steps: int | None = None) -> Program:
        """Lower the schedule for ``p`` stages and ``m`` micro-batches a step.

        Of a schedule without a flush it has as many steps as are given.

        Raises:
            ScheduleError: If it yields what is no operation, or an order that no stage can follow.
        """
        for what, number in (("stages", p), ("micro-batches", m)):
            if not isinstance(number, int):
                raise ScheduleError(f"{self.name}: {number!r} {what}; expected a whole number")
        least = self.least(p) if p > 0 else 1
        if p < 1 or m < least:
            raise ScheduleError(
                f"{self.name}: {p} stages and {m} micro-batches; expected at least 1 stage and "
                f"{least} micro-batches"
            )
        free = self.steps > 1 and steps is not None
        return lower(replace(self, steps=steps) if free else self, p, m)

    def chunk(self, stage: int, local: int, p: int) -> int:
        """Return the number of the c-th chunk of a stage."""
        return LAYOUTS[self.layout](stage, local, p)


class Use(NamedTuple):
    """A forward pass that asks for a version of the parameters.

    Attributes:
        micro: Its micro-batch.
        stage: Its stage.
        newest: The newest version that this stage has.
        p: Stages.
        m: Micro-batches of a step.
    """

    micro: int
    stage: int
    newest: int
    p: int
    m: int


def pipeline(name: str, live: Bound, **settings: object) -> Callable[..., Schedule]:
    """Make a `Schedule` of a generator; the docstring's ``Source:`` goes with it."""

    def make(order: Callable[[int, int, int], Iterable[Op]]) -> Schedule:
        text = (order.__doc__ or "").partition("Source:")[2]
        more: Any = settings
        return Schedule(name, order, live, source=" ".join(text.split()), **more)

    return make


@dataclass(frozen=True)
class Program:
    """The operations of every stage.

    Attributes:
        schedule: What it was made of.
        p: Stages.
        m: Micro-batches of a step.
        stages: The operations of each stage, with chunk numbers over all stages.
    """

    schedule: Schedule
    p: int
    m: int
    stages: tuple[tuple[Op, ...], ...]

    @property
    def micros(self) -> int:
        """Micro-batches of all steps of the program."""
        return self.m * self.schedule.steps

    @property
    def depth(self) -> int:
        """Chunks of the whole model."""
        return self.p * self.schedule.chunks

    def owner(self, chunk: int) -> int:
        """Return the stage that has a chunk."""
        p = self.p
        return chunk % p if self.schedule.layout == "loop" else min(chunk, 2 * p - 1 - chunk)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The stages of all chunks."""
        return tuple(map(self.owner, range(self.depth)))

    def peer(self, op: Op) -> int:
        """Return the stage at the other end of a SEND or RECV."""
        to = op.chunk + (1 if op.what == "x" else -1)
        return self.owners[to if op.kind == "SEND" else op.chunk]

    def altered(self, stage: int, ops: Sequence[Op]) -> Program:
        """Return a program in which one stage has other operations."""
        stages = tuple(tuple(ops) if s == stage else old for s, old in enumerate(self.stages))
        return replace(self, stages=stages)

    def __str__(self) -> str:
        """Name the program."""
        return f"{self.schedule.name}, {self.p} stages, {self.m} micro-batches"


def lower(schedule: Schedule, p: int, m: int) -> Program:
    """Make a program of a schedule.

    The events of all stages, computations and transfers, are put in one order in which they can
    happen; every stage gets its own part of it. A transfer is an event of both its ends. So in
    whatever state stages wait for each other, the earliest event that is left can proceed.

    Raises:
        ScheduleError: As `Schedule.program` does.
    """
    if schedule.rule:
        orders = by_rule(schedule, p, m)
    else:
        orders = [_computations(schedule, stage, p, m) for stage in range(p)]
    program = Program(schedule, p, m, tuple(map(tuple, orders)))
    times = _start_times(program)
    lists: list[list[tuple[tuple[int, int, Op], Op]]] = [[] for _ in range(p)]
    for stage, order in enumerate(orders):
        for op in order:
            start = times[op]
            lists[stage].append(((start, 1, op), op))
            target = _receiver(program, op)
            if target is not None:
                what = "x" if op.kind == "F" else "dx"
                key = (start + 1, 0, op)
                lists[stage].append((key, Op("SEND", op.micro, op.chunk, what)))
                lists[target].append((key, Op("RECV", op.micro, op.chunk, what)))
    stages = [_ended(schedule, [op for _, op in sorted(pairs)], m) for pairs in lists]
    return replace(program, stages=tuple(map(tuple, stages)))


def _computations(schedule: Schedule, stage: int, p: int, m: int) -> list[Op]:
    """Return what a stage computes, with chunk numbers of the model."""
    unit, total = schedule.pad(p), m * schedule.steps
    padded = -(-total // unit) * unit
    found: list[Op] = []
    for number, op in enumerate(_author(schedule, stage, p, padded)):
        if number > 2 * len(COMPUTE) * schedule.chunks * padded:
            raise ScheduleError(f"{schedule.name}: stage {stage} goes on after {number} operations")
        if not isinstance(op, Op) or op.kind not in COMPUTE:
            raise ScheduleError(f"{schedule.name}: stage {stage} yields {op!r}; expected F, B or W")
        if not 0 <= op.chunk < schedule.chunks or not 0 <= op.micro < padded:
            raise ScheduleError(
                f"{schedule.name}: stage {stage} yields {op}, for {m} micro-batches and "
                f"{schedule.chunks} chunks a stage"
            )
        if op.micro < total:
            found.append(op._replace(chunk=schedule.chunk(stage, op.chunk, p)))
    return found


def by_rule(schedule: Schedule, p: int, m: int) -> list[list[Op]]:
    """Let every stage do what comes first by the rule of a schedule, a unit of time at a time.

    Raises:
        ScheduleError: If no stage can do anything within the activations that it may hold.
    """
    total, depth = m * schedule.steps, p * schedule.chunks
    own = [[schedule.chunk(stage, c, p) for c in range(schedule.chunks)] for stage in range(p)]
    following = [{(kind, c): 0 for c in chunks for kind in COMPUTE} for chunks in own]
    most = [schedule.chunks * schedule.live(stage, p, m) for stage in range(p)]
    ended: dict[Op, int] = {}
    orders: list[list[Op]] = [[] for _ in range(p)]
    held, now = [0] * p, 0
    while any(len(order) < 3 * schedule.chunks * total for order in orders):
        found: list[tuple[int, Op]] = []
        for stage, micros in enumerate(following):
            ready = [
                op
                for (kind, chunk), micro in micros.items()
                if micro < total and not (kind == "F" and held[stage] + 1 > most[stage])
                for op in [Op(kind, micro, chunk)]
                if all(ended.get(need, now + 1) <= now for need in needs(op, depth))
            ]
            if ready:
                found.append((stage, _first(schedule, ready)))
        if not found:
            raise ScheduleError(f"{schedule.name}: {p} stages that hold {most} chunks cannot go on")
        now += 1
        for stage, op in found:
            ended[op] = now
            orders[stage].append(op)
            following[stage][op.kind, op.chunk] += 1
            held[stage] += {"F": 1, "B": 0, "W": -1}[op.kind]
    return orders


def _first(schedule: Schedule, ready: list[Op]) -> Op:
    try:
        return min(ready, key=schedule.order)  # type: ignore[arg-type]
    except Exception as error:
        text = f"{', '.join(map(str, ready))}: {type(error).__name__}: {error}"
        raise ScheduleError(f"{schedule.name}: the rule cannot order {text}") from error


def _author(schedule: Schedule, stage: int, p: int, m: int) -> Iterator[Op]:
    try:
        yield from schedule.order(stage, p, m)
    except ScheduleError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ScheduleError(f"{schedule.name}: stage {stage} of {p}: {text}") from error


def needs(op: Op, depth: int) -> list[Op]:
    """Return the computations whose results a computation needs, on any stage."""
    if op.kind == "F":
        return [op._replace(chunk=op.chunk - 1)] if op.chunk else []
    own = [op._replace(kind="F" if op.kind == "B" else "B")]
    if op.kind == "B" and op.chunk < depth - 1:
        own.append(op._replace(chunk=op.chunk + 1))
    return own


def _receiver(program: Program, op: Op) -> int | None:
    """Return the stage that needs the result of a computation, if it is another one."""
    chunk = {"F": op.chunk + 1, "B": op.chunk - 1}.get(op.kind, -1)
    if not 0 <= chunk < program.depth or program.owner(chunk) == program.owner(op.chunk):
        return None
    return program.owner(chunk)


def _start_times(program: Program) -> dict[Op, int]:
    """Return when each computation starts if all take one unit of time and transfers none.

    Raises:
        ScheduleError: If a stage waits for what comes after what it holds up.
    """
    times: dict[Op, int] = {}
    ready, at = [0] * program.p, [0] * program.p
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(program.stages):
            while at[stage] < len(order):
                op = order[at[stage]]
                wanted = needs(op, program.depth)
                if any(need not in times for need in wanted):
                    break
                start = max([ready[stage], *(times[need] + 1 for need in wanted)])
                times.setdefault(op, start)
                ready[stage], at[stage], moved = start + 1, at[stage] + 1, True
    stuck = [s for s, order in enumerate(program.stages) if at[s] < len(order)]
    if stuck:
        waits = []
        for stage in stuck:
            op = program.stages[stage][at[stage]]
            missing = [need for need in needs(op, program.depth) if need not in times]
            waits.append(f"stage {stage} is at {op} and needs {', '.join(map(str, missing))}")
        raise ScheduleError(f"{program}: no stage can go on: {'; '.join(waits)}")
    return times


def _ended(schedule: Schedule, ops: Iterable[Op], m: int) -> list[Op]:
    """Add FREE behind the last use of an activation, REDUCE and STEP behind that of a gradient."""
    ops, per = list(ops), schedule.per_step(m)
    last = {(op.chunk, op.micro // per): i for i, op in enumerate(ops) if op.kind == "W"}
    final: dict[int, int] = {}
    for (_, step), i in last.items():
        final[step] = max(final.get(step, 0), i)
    found = []
    for i, op in enumerate(ops):
        found.append(op)
        if op.kind != "W":
            continue
        found.append(op._replace(kind="FREE"))
        step = op.micro // per
        if last[op.chunk, step] == i:
            found.append(Op("REDUCE", step, op.chunk))
        if final[step] == i:
            found.append(Op("STEP", step))
    return found

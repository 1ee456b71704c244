"""Proving a program: the stages run it symbolically, with transfers that block both of their ends.

What is proven of every program: each F, B and W happens once, on the stage that has the chunk,
after what it needs; every transfer meets the one it is meant for, without any buffer, and no two
stages wait for each other; nothing is used after it was freed; gradients are added in the order of
the micro-batches, and all of them before REDUCE and STEP; no stage holds more activations or more
versions of its parameters than the schedule states, and takes none that is older; a backward pass
takes the version of its forward pass; the busiest stage waits no longer than the schedule states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from pycoll.errors import ScheduleError
from pycoll.parallel.pipeline.program import COMPUTE, Op, Program, Use, needs


@dataclass(frozen=True)
class Proof:
    """What a proven program keeps.

    Attributes:
        program: The program.
        live: Most activations each stage holds at once, in micro-batches of a whole stage.
        versions: Most versions of its parameters that each stage holds at once.
        transfers: Messages that each stage sends.
        bubble: How long the busiest stage waits if F, B and W take one unit of time each.
        order: The operations of all stages in an order in which they can happen: ``(stage, op)``.
        used: Version of the parameters that each forward pass takes: ``(stage, op)`` -> version.
    """

    program: Program
    live: tuple[float, ...]
    versions: tuple[int, ...]
    transfers: tuple[int, ...]
    bubble: int
    order: tuple[tuple[int, Op], ...] = field(repr=False)
    used: dict[tuple[int, Op], int] = field(repr=False)


def prove(program: Program) -> Proof:
    """Prove a program.

    Raises:
        ScheduleError: Naming the stages and operations that are wrong.
    """
    _check_complete(program)
    stages = [_Stage(program, number) for number in range(program.p)]
    order = tuple(_run(program, stages))
    for stage in stages:
        stage.check_end()
    return Proof(
        program,
        tuple(stage.most_live / program.schedule.chunks for stage in stages),
        tuple(stage.most_versions for stage in stages),
        tuple(sum(op.kind == "SEND" for op in ops) for ops in program.stages),
        _check_time(program, order),
        order,
        {(s.number, op): version for s in stages for op, version in s.used.items()},
    )


def _check_complete(program: Program) -> None:
    """Check that every computation happens once, on the right stage."""
    for number, ops in enumerate(program.stages):
        counts = Counter(op for op in ops if op.kind in COMPUTE)
        chunks = [c for c in range(program.depth) if program.owner(c) == number]
        wanted = {Op(kind, i, c) for kind in COMPUTE for i in range(program.micros) for c in chunks}
        for op in sorted(wanted - counts.keys()):
            raise ScheduleError(f"{program}: stage {number} never runs {op}")
        for op in sorted(counts.keys() - wanted):
            raise ScheduleError(f"{program}: stage {number} runs {op}, which is not its own")
        for op, count in sorted(counts.items()):
            if count > 1:
                raise ScheduleError(f"{program}: stage {number} runs {op} {count} times")


def _run(program: Program, stages: list[_Stage]) -> Iterator[tuple[int, Op]]:
    """Run all stages; a transfer happens when both of its ends have come to it."""
    moved = True
    while moved:
        moved = False
        for stage in stages:
            while (op := stage.next()) is not None:
                peer = _peer(program, stage, op, stages)
                if peer is not None and peer.next() != _other_end(op):
                    break
                if peer is not None:
                    sender, receiver = (stage, peer) if op.kind == "SEND" else (peer, stage)
                    yield sender.number, sender.do()
                    yield receiver.number, receiver.do()
                else:
                    yield stage.number, stage.do()
                moved = True
    stuck = [stage for stage in stages if stage.next() is not None]
    if stuck:
        waits = [f"stage {stage.number} in {stage.next()}" for stage in stuck]
        over = [f"stage {stage.number}" for stage in stages if stage not in stuck]
        done = f"; {', '.join(over)} at the end" if over else ""
        raise ScheduleError(
            f"{program}: stages wait for each other, where no transfer is buffered: "
            f"{', '.join(waits)}{done}"
        )


def _check_time(program: Program, order: Iterable[tuple[int, Op]]) -> int:
    """Return the bubble: what is needed comes before what needs it in the order."""
    ends: dict[Op, int] = {}
    ready = [0] * program.p
    for stage, op in order:
        if op.kind in COMPUTE:
            times = [ends[need] for need in needs(op, program.depth)]
            ends[op] = ready[stage] = 1 + max(ready[stage], *times, 0)
    busy = Counter(program.owners[op.chunk] for op in ends)
    bubble, stated = max(ready) - max(busy.values()), program.schedule.bubble
    if stated is not None and bubble > (most := stated(program.p, program.m)):
        stage = ready.index(max(ready))
        raise ScheduleError(
            f"{program}: the busiest stage waits for {bubble} units of time until stage {stage} is "
            f"at the end; the schedule states {most:g}"
        )
    return bubble


def _other_end(op: Op) -> Op:
    return op._replace(kind="RECV" if op.kind == "SEND" else "SEND")


def _peer(program: Program, stage: _Stage, op: Op, stages: list[_Stage]) -> _Stage | None:
    """Return the stage at the other end of a transfer."""
    if op.kind not in ("SEND", "RECV"):
        return None
    target = op.chunk + (1 if op.what == "x" else -1)
    if op.what not in ("x", "dx") or not (
        0 <= op.chunk < program.depth and 0 <= target < program.depth
    ):
        raise ScheduleError(f"{program}: stage {stage.number}: {op} goes nowhere")
    ends = program.owner(op.chunk), program.owner(target)
    own, other = ends if op.kind == "SEND" else ends[::-1]
    if own != stage.number or own == other:
        raise ScheduleError(
            f"{program}: stage {stage.number}: {op} is a transfer from stage {ends[0]} to "
            f"stage {ends[1]}"
        )
    return stages[other]


class _Stage:
    """What one stage has done and holds."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number, self._ops, self._at = program, number, program.stages[number], 0
        self._per = program.schedule.per_step(program.m)
        self._done: set[Op] = set()
        self._arrived: set[Op] = set()  # the computations whose results have come
        self._sent: set[Op] = set()
        self._freed: set[tuple[int, int]] = set()
        self._live: set[tuple[int, int]] = set()
        self._summed: dict[int, int] = {}  # the next micro-batch whose gradient each chunk adds
        self._reduced: Counter[int] = Counter()
        self._version, self.used = 0, dict[Op, int]()
        self._forwards = [op for op in self._ops if op.kind == "F"]
        self.most_live = self.most_versions = 0

    def next(self) -> Op | None:
        """Return the operation that comes now; None at the end."""
        return self._ops[self._at] if self._at < len(self._ops) else None

    def do(self) -> Op:
        """Take the next operation and check that it may happen."""
        op = self._ops[self._at]
        self._at += 1
        check = getattr(self, f"_{op.kind.lower()}", None)
        if check is None:
            self._refuse(op, "is no operation")
        check(op)
        return op

    def _refuse(self, op: Op, why: str) -> NoReturn:
        raise ScheduleError(f"{self.program}: stage {self.number}: {op} {why}")

    def _compute(self, op: Op) -> None:
        for need in needs(op, self.program.depth):
            if need not in self._done and need not in self._arrived:
                self._refuse(op, f"comes before the result of {need} is there")
        self._done.add(op)

    def _f(self, op: Op) -> None:
        self._compute(op)
        self._live.add((op.micro, op.chunk))
        self.most_live = max(self.most_live, len(self._live))
        bound = self.program.schedule.live(self.number, self.program.p, self.program.m)
        if len(self._live) / self.program.schedule.chunks > bound:
            held = ", ".join(f"F{micro}.{chunk}" for micro, chunk in sorted(self._live))
            self._refuse(
                op,
                f"makes {len(self._live)} live activations of one chunk ({held}); "
                f"the schedule states {bound * self.program.schedule.chunks:g}",
            )
        self._take_version(op)

    def _b(self, op: Op) -> None:
        self._use(op)
        self._compute(op)

    def _w(self, op: Op) -> None:
        self._use(op)
        self._compute(op)
        expected = self._summed.get(op.chunk, 0)
        if op.micro != expected:
            self._refuse(op, f"adds its gradient before that of micro-batch {expected}")
        self._summed[op.chunk] = expected + 1

    def _use(self, op: Op) -> None:
        if (op.micro, op.chunk) in self._freed:
            self._refuse(op, f"needs the activation of F{op.micro}.{op.chunk}, which was freed")

    def _free(self, op: Op) -> None:
        if (op.micro, op.chunk) not in self._live:
            self._refuse(op, "frees an activation that is not there")
        self._live.remove((op.micro, op.chunk))
        self._freed.add((op.micro, op.chunk))

    def _send(self, op: Op) -> None:
        made = Op("F" if op.what == "x" else "B", op.micro, op.chunk)
        if made not in self._done:
            self._refuse(op, f"comes before {made}")
        if op in self._sent:
            self._refuse(op, "comes twice")
        self._sent.add(op)

    def _recv(self, op: Op) -> None:
        made = Op("F" if op.what == "x" else "B", op.micro, op.chunk)
        if made in self._arrived:
            self._refuse(op, "comes twice")
        self._arrived.add(made)

    def _reduce(self, op: Op) -> None:
        if self._summed.get(op.chunk, 0) != (op.micro + 1) * self._per:
            self._refuse(
                op,
                f"comes when gradients up to micro-batch "
                f"{self._summed.get(op.chunk, 0) - 1} are in",
            )
        self._reduced[op.micro] += 1

    def _step(self, op: Op) -> None:
        if op.micro != self._version:
            self._refuse(op, f"comes as step {self._version}")
        if self._reduced[op.micro] != self.program.schedule.chunks:
            self._refuse(op, "comes before the gradients of all chunks are reduced")
        self._version += 1
        self._count_versions()

    def _take_version(self, op: Op) -> None:
        version = self._wanted(op, self._version)
        if not 0 <= version <= self._version:
            self._refuse(op, f"wants version {version} of the parameters, of {self._version + 1}")
        program, lacks = self.program, op.micro // self._per - version
        if lacks > (most := program.schedule.age(self.number, program.p, program.m)):
            self._refuse(
                op,
                f"takes version {version} of the parameters, which lacks {lacks} steps; "
                f"the schedule states {most:g}",
            )
        self.used[op] = version
        self._count_versions()

    def _wanted(self, op: Op, newest: int) -> int:
        rule, program = self.program.schedule.weights, self.program
        if rule is None:
            return newest
        try:
            version = rule(Use(op.micro, self.number, newest, program.p, program.m))
        except Exception as error:
            self._refuse(op, f"has no version: {type(error).__name__}: {error}")
        if not isinstance(version, int):
            self._refuse(op, f"wants version {version!r} of the parameters; expected a number")
        return version

    def _count_versions(self) -> None:
        """Count the versions that are new, or needed by what is in flight or still to come."""
        held = {self._version}
        for op in self._forwards:
            if op in self.used and Op("W", op.micro, op.chunk) not in self._done:
                held.add(self.used[op])
            elif op not in self._done:
                held |= {self._wanted(op, self._version)} & set(range(self._version))
        self.most_versions = max(self.most_versions, len(held))
        bound = self.program.schedule.versions(self.number, self.program.p, self.program.m)
        if len(held) > bound:
            raise ScheduleError(
                f"{self.program}: stage {self.number} holds versions {sorted(held)} of its "
                f"parameters; the schedule states {bound:g}"
            )

    def check_end(self) -> None:
        """Check that nothing is left over."""
        if self._live:
            micro, chunk = min(self._live)
            raise ScheduleError(
                f"{self.program}: stage {self.number} never frees the activation of "
                f"F{micro}.{chunk}"
            )
        steps = self.program.micros // self._per
        if self._version != steps:
            raise ScheduleError(
                f"{self.program}: stage {self.number} takes {self._version} of {steps} steps"
            )

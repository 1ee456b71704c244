"""A stream of steps without a flush, cut into one window of operations for each step.

The window of a step has what can happen once its micro-batches are there and those of later steps
are not. No transfer crosses the border of a window. After some steps that fill the pipeline all
windows are the same but for the numbers of the micro-batches; when no step follows, the operations
that are left drain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from pycoll.errors import ScheduleError
from pycoll.parallel.pipeline.program import Op, Program, Schedule
from pycoll.parallel.pipeline.proof import prove


class Windows:
    """What a stage does in each step of a schedule without a flush.

    All programs that windows are cut from are proven.

    Attributes:
        fill: Steps until windows are the same.
    """

    def __init__(self, schedule: Schedule, p: int, m: int, stage: int) -> None:
        """Cut the stream.

        Raises:
            ScheduleError: If the schedule does not come to repeat itself.
        """
        self._schedule, self._p, self._m, self._stage = schedule, p, m, stage
        self.fill: int = -(-p // m) + 1
        self._program = prove(schedule.program(p, m, self.fill + 3)).program
        self._cuts = [_cut(self._program, step * m) for step in range(self.fill + 3)]
        self._remaining = cache(self._left_after)
        for number in range(p):
            one, two = (self._window(self.fill + i, number) for i in (0, 1))
            if self._shifted(one, 1) != list(two):
                raise ScheduleError(
                    f"{self._program}: stage {number} does not do the same in every step: "
                    f"{_text(one)}, then {_text(two)}"
                )

    def _window(self, step: int, stage: int) -> Sequence[Op]:
        first, end = self._cuts[step][stage], self._cuts[step + 1][stage]
        return self._program.stages[stage][first:end]

    def _shifted(self, ops: Sequence[Op], steps: int) -> list[Op]:
        per = self._schedule.per_step(self._m)
        add = {"STEP": steps * self._m // per, "REDUCE": steps * self._m // per}
        return [op._replace(micro=op.micro + add.get(op.kind, steps * self._m)) for op in ops]

    def step(self, number: int) -> list[Op]:
        """Return the operations of a step, counted from 0."""
        known = min(number, self.fill)
        return self._shifted(self._window(known, self._stage), number - known)

    def drain(self, steps: int) -> list[Op]:
        """Return what is left to do after a number of steps, at least 1."""
        known = min(steps, self.fill + 1)
        return self._shifted(self._remaining(known), steps - known)

    def _left_after(self, steps: int) -> Sequence[Op]:
        program = prove(self._schedule.program(self._p, self._m, steps)).program
        for stage, cut in enumerate(self._cuts[steps]):
            done = self._program.stages[stage][:cut]
            if program.stages[stage][:cut] != done:
                raise ScheduleError(f"{program}: stage {stage} knows of steps that come later")
        return program.stages[self._stage][self._cuts[steps][self._stage] :]


def _cut(program: Program, limit: int) -> list[int]:
    """Return how far each stage comes without the micro-batches from `limit` on."""
    at, stages = [0] * program.p, program.stages

    def head(stage: int) -> Any:
        return stages[stage][at[stage]] if at[stage] < len(stages[stage]) else None

    moved = True
    while moved:
        moved = False
        for stage in range(program.p):
            while (op := head(stage)) is not None and not (op.kind == "F" and op.micro >= limit):
                if op.kind in ("SEND", "RECV"):
                    other = {"SEND": "RECV", "RECV": "SEND"}[op.kind]
                    peer = program.peer(op)
                    if head(peer) != op._replace(kind=other):
                        break
                    at[peer] += 1
                at[stage] += 1
                moved = True
    return at


def _text(ops: Sequence[Op]) -> str:
    return " ".join(map(str, ops))

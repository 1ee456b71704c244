"""How long a program takes and how much it holds, for given times of its operations.

Stages compute as soon as what they need is there; a transfer takes time but keeps nobody from
computing. With equal times the bubble of a schedule is the one its ``Cost:`` states, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pycoll.parallel.pipeline.program import COMPUTE, Op, Program, needs


@dataclass(frozen=True)
class Costs:
    """Seconds (or any other unit) of the operations of one chunk.

    Attributes:
        forward: Of F.
        backward: Of B, the gradient of the input.
        weight: Of W, the gradient of the parameters.
        transfer: From the end of a computation to its result on another stage.
        scale: Factor for a chunk, by its number: layers differ.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    scale: Callable[[int], float] = lambda chunk: 1.0

    def of(self, op: Op) -> float:
        """Return how long a computation takes."""
        base = {"F": self.forward, "B": self.backward, "W": self.weight}[op.kind]
        return base * self.scale(op.chunk)


@dataclass(frozen=True)
class Timing:
    """When everything happens.

    Attributes:
        program: The program.
        spans: ``(start, end)`` of every computation, by stage.
        total: From the first start to the last end.
        busy: Time that each stage computes.
    """

    program: Program
    spans: tuple[dict[Op, tuple[float, float]], ...] = field(repr=False)
    total: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The time that the busiest stage does not compute."""
        return self.total - max(self.busy)

    @property
    def stalls(self) -> tuple[float, ...]:
        """The time that each stage waits between its first computation and its last one."""
        edges = [
            (min(s for s, _ in own.values()), max(e for _, e in own.values())) for own in self.spans
        ]
        return tuple(
            last - first - busy for (first, last), busy in zip(edges, self.busy, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """The part of a step in which the busiest stage does not compute: 0 is best."""
        return self.bubble / self.total if self.total else 0.0


def simulate(program: Program, costs: Costs | None = None) -> Timing:
    """Run a program in time.

    Args:
        program: A program that `prove` accepts.
        costs: Times of its operations; all 1 if None.
    """
    costs = costs or Costs()
    ends: dict[Op, float] = {}
    spans: list[dict[Op, tuple[float, float]]] = [{} for _ in program.stages]
    orders = [[op for op in ops if op.kind in COMPUTE] for ops in program.stages]
    ready, at = [0.0] * program.p, [0] * program.p
    left = sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                op = order[at[stage]]
                wanted = needs(op, program.depth)
                if any(need not in ends for need in wanted):
                    break
                start = max(
                    [ready[stage], *(_arrival(program, n, stage, ends, costs) for n in wanted)]
                )
                ends[op] = ready[stage] = start + costs.of(op)
                spans[stage][op] = start, ends[op]
                at[stage] += 1
                left -= 1
    busy = tuple(sum(end - start for start, end in own.values()) for own in spans)
    return Timing(program, tuple(spans), max(ready), busy)


def _arrival(program: Program, need: Op, stage: int, ends: dict[Op, float], costs: Costs) -> float:
    return ends[need] + (costs.transfer if program.owner(need.chunk) != stage else 0.0)

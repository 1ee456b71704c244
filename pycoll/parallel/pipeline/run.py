"""Running a stage's part of a program: one operation after the other, errors with their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.pipeline.program import COMPUTE, Op, Program
from pycoll.parallel.state.gradients import plan_sum

_MICROS = 1 << 16  # that can be told apart by their tags; far fewer are on their way at a time
LOSS_TAG = 1 << 30
"""Tag of what a stage tells others besides activations."""
AHEAD = 2
"""Receives that are posted before their turn: mostly the next output and the next gradient."""


class Turn(NamedTuple):
    """An operation of a stage, and what goes with it.

    Attributes:
        op: The operation.
        link: Of SEND and RECV: the stage at the other end, the tag, and the kind of array.
        following: Of a computation: what the stage computes next.
        early: Receives that are posted ahead just before it.
    """

    op: Op
    link: tuple[int, int, tuple[str, int]] = (0, 0, ("", 0))
    following: Op | None = None
    early: tuple[Turn, ...] = ()


def turns(program: Program, ops: Iterable[Op]) -> list[Turn]:
    """Return the turns of a stage: `AHEAD` receives are posted at first, and one at each receive.

    FREE and REDUCE have none: what W has used up is gone with it, and the last W of a bucket
    starts its reduction.
    """
    found = [Turn(op) for op in ops if op.kind not in ("FREE", "REDUCE")]
    computed = [i for i, turn in enumerate(found) if turn.op.kind in COMPUTE]
    for i, later in pairwise(computed):
        found[i] = found[i]._replace(following=found[later].op)
    for i, (op, *_) in enumerate(found):
        if op.kind in ("SEND", "RECV"):
            found[i] = Turn(op, (program.peer(op), _tag(op), (op.what, op.chunk)))
    coming = [(i, turn) for i, turn in enumerate(found) if turn.op.kind == "RECV"]
    receives = [turn for _, turn in coming]
    for number, (i, turn) in enumerate(coming, AHEAD):
        found[i] = turn._replace(early=tuple(receives[number : number + 1]))
    if found:
        found[0] = found[0]._replace(early=(*receives[:AHEAD], *found[0].early))
    return found


class Run:
    """What a stage has between the operations of a program.

    Attributes:
        losses: Loss and number of samples of each micro-batch, if this stage has the last chunk.
        counts: Number of samples of each micro-batch that this stage has gone back through.
        problems: What forbids to take the step.
    """

    def __init__(self, engine: Any, sample: Callable[[int], Sample]) -> None:
        self._engine, self._sample = engine, sample
        self._program: Program = engine.program
        self._per = self._program.schedule.per_step(self._program.m)
        self._terms = plan_sum(self._per, engine.options.order)
        self._values: dict[tuple[str, int, int], Any] = {}
        self._saved: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self.losses: list[tuple[float, int]] = []
        self.counts: dict[int, int] = {}
        self.problems: list[str] = []
        self._coming: deque[Turn] = deque()  # receives whose turn has come, not waited for yet
        self._at: Op | None = None  # the operation under way
        self._meanwhile: Callable[[], Any] | None = None
        self._do: dict[str, Callable[[Turn], None]] = {
            "F": self._forward,
            "B": self._backward,
            "W": self._weight,
            "SEND": self._send,
            "RECV": self._coming.append,
            "STEP": self._step,
        }

    def all(self, turns: Iterable[Turn], meanwhile: Callable[[], Any] | None = None) -> None:
        """Take turns, and wait until everything is sent; do `meanwhile` before the first wait.

        A stage waits for an array when it needs it, not at its RECV, and for older sends; whenever
        it has to wait, all receives up to there come first, in their order. So it waits where the
        proof lets it wait, or later: there it stops at every transfer. Errors tell stage,
        micro-batch and layer.
        """
        do, expect = self._do, self._engine.transfers.expect
        self._meanwhile = meanwhile
        try:
            for turn in turns:
                for early in turn.early:
                    self._at = early.op
                    expect(*early.link)
                self._at = turn.op
                do[turn.op.kind](turn)
            self._receive_all()
            self._at = None
            self._engine.transfers.finish()
        except Exception as error:
            if self._at is None:
                raise
            if isinstance(error, (ArgumentError, MismatchError)):
                raise type(error)(f"{self._place(self._at)}: {error}") from error
            if note := getattr(error, "add_note", None):  # Python 3.11
                note(f"in the pipeline: {self._place(self._at)}")
            raise

    def _place(self, op: Op) -> str:
        where = f"stage {self._engine.stage}, {op.kind} of "
        if op.kind in ("SEND", "RECV"):
            way = "to" if op.kind == "SEND" else "from"
            layer = self._engine.cuts[op.chunk][-1 if op.what == "x" else 0]
            where += f"{op.what} of micro-batch {op.micro}, chunk {op.chunk}, layer {layer}, "
            return f"{where}{way} stage {self._program.peer(op)}"
        if op.kind not in "FBW":
            return f"{where}step {op.micro}"
        layer = getattr(self._engine._passes[op.chunk], "running", "")
        return f"{where}micro-batch {op.micro}, chunk {op.chunk}, layer {layer}"

    def _forward(self, turn: Turn) -> None:
        _, i, c, _ = turn.op
        engine, passes = self._engine, self._engine._passes[c]
        inputs, targets = self._sample(i)  # on every stage: taking one may set a `Cursor`
        x = inputs if c == 0 else self._needed("x", i, c - 1)
        y, self._saved[i, c] = passes.forward(x)
        if c < self._program.depth - 1:
            self._values["x", i, c] = y
            return
        loss, count, dy = passes.loss(y, targets, engine.loss_scale.value)
        self.losses.append((loss, count))
        self.counts[i] = count
        self._values["dx", i, c + 1] = dy

    def _backward(self, turn: Turn) -> None:
        _, i, c, _ = turn.op
        self._sample(i)  # layers that run forward again draw the same random numbers
        dy = self._needed("dx", i, c + 1)
        passes, later = self._engine._passes[c], turn.following != ("W", i, c, "")
        dx, self._gradients[i, c] = passes.back_input(dy, self._saved[i, c], later)
        if c:
            self._values["dx", i, c] = dx

    def _weight(self, turn: Turn) -> None:
        _, i, c, _ = turn.op
        passes, at = self._engine._passes[c], i % self._per
        passes.begin(self._terms[at], at == self._per - 1)
        passes.back_weight(self._saved.pop((i, c)), self._gradients.pop((i, c)))
        self.problems += self._engine.graph_problems(i, c)

    def _send(self, turn: Turn) -> None:
        op, (peer, tag, kind) = turn.op, turn.link
        if self._engine.transfers.full:  # it would wait
            self._receive_all()
        x = self._values.pop((op.what, op.micro, op.chunk))
        count = self.counts.get(op.micro, 0) if self._program.schedule.steps > 1 else 0
        place = partial(self._place, op)
        self._engine.transfers.post(x, peer, tag, count, kind=kind, place=place)

    def _needed(self, what: str, micro: int, chunk: int) -> Any:
        """Take out an array, and wait for it if another stage sends it."""
        while (what, micro, chunk) not in self._values:
            self._receive(self._coming.popleft())
        return self._values.pop((what, micro, chunk))

    def _receive_all(self) -> None:
        while self._coming:
            self._receive(self._coming.popleft())

    def _receive(self, turn: Turn) -> None:
        op, (source, tag, kind) = turn.op, turn.link
        before, self._at = self._at, op  # which an error is about
        if self._meanwhile is not None:
            self._meanwhile()
            self._meanwhile = None
        x, count = self._engine.transfers.receive(source, tag, kind=kind)
        self._values[op.what, op.micro, op.chunk] = x
        if op.what == "dx":
            self.counts[op.micro] = count
        self._at = before

    def _step(self, turn: Turn) -> None:
        """Leave it to `DataParallel.step`, in which all ranks agree on it."""


def _tag(op: Op) -> int:
    return op.micro % _MICROS << 12 | op.chunk << 1 | (op.what == "dx")

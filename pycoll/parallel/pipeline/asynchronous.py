"""Training without a flush: stages step by themselves and keep the versions of their parameters.

A call of `step` runs one window of the stream and leaves micro-batches in flight; the next call
goes on with them. Nothing in a call waits for all stages, so that the report of a step comes one
call later. What needs all stages to have the same parameters drains the pipeline first.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel.channels import Groups
from pycoll.parallel.engine.agreement import agree, most_micro_batches, reduced
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Sample, Samples
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.pipeline.program import Op, Program, Use
from pycoll.parallel.pipeline.run import LOSS_TAG, Run, Turn, turns
from pycoll.parallel.pipeline.windows import Windows
from pycoll.parallel.settings import refusal
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.gradients import sum_losses

Update = Callable[[], None]


class Versions:
    """The parameters of a stage: the newest, and older ones that are still needed.

    Attributes:
        newest: Number of steps that the stage has taken since the pipeline was empty.
        most: Most versions that were held at once.
    """

    def __init__(self, buckets: Sequence[Bucket], program: Program, stage: int) -> None:
        self._buckets, self._program, self._stage = buckets, program, stage
        self.newest: int = 0
        self.most: int = 1
        self._next = 0
        self._held = {0: [bucket.version for bucket in buckets]}
        self._used: dict[tuple[int, int], int] = {}

    def forward(self, op: Op) -> None:
        """Use the version that a forward pass takes, and keep it for the backward pass."""
        self._used[op.micro, op.chunk] = version = self._wanted(op.micro)
        self._next = max(self._next, op.micro + 1)
        self._use(version)

    def backward(self, op: Op) -> None:
        """Use the version of the forward pass."""
        self._use(self._used[op.micro, op.chunk])

    def forget(self, op: Op) -> None:
        """Keep it no longer for this micro-batch."""
        del self._used[op.micro, op.chunk]
        self._drop()

    def advance(self, update: Update) -> None:
        """Make a new version of the newest one by an update of the buckets."""
        self._drop()
        self._use(self.newest)
        if self.newest in self._needed():
            for bucket in self._buckets:
                bucket.fork()
        else:
            del self._held[self.newest]
        update()
        self.newest += 1
        self._held[self.newest] = [bucket.version for bucket in self._buckets]
        self._drop()
        self.most = max(self.most, len(self._held))

    def settle(self) -> None:
        """Use the newest version once this rank has all of it."""
        self._use(self.newest)
        for bucket in self._buckets:
            bucket.complete.wait()

    def _wanted(self, micro: int) -> int:
        rule, program = self._program.schedule.weights, self._program
        use = Use(micro, self._stage, self.newest, program.p, program.m)
        return self.newest if rule is None else rule(use)

    def _needed(self) -> set[int]:
        later = self._wanted(self._next)  # a rule that is not None does not ask for older ones then
        asked = {v for v in self._held if v >= later and self._program.schedule.weights is not None}
        return set(self._used.values()) | asked

    def _drop(self) -> None:
        needed = self._needed() | {self.newest}
        self._held = {v: state for v, state in self._held.items() if v in needed}

    def _use(self, version: int) -> None:
        for bucket, state in zip(self._buckets, self._held[version], strict=True):
            bucket.version = state


class _Flow(Run):
    """A run over many steps, each stage stepping by itself."""

    def __init__(self, engine: Any, stage: Groups) -> None:
        super().__init__(engine, self._take)
        self._stage = stage
        self.versions = Versions(engine.buckets, engine.program, engine.stage)
        self._batches: dict[int, tuple[Samples, float]] = {}
        self.norm = math.nan

    def add(self, call: int, micro_batches: Samples, lr: float) -> None:
        """Let the micro-batches of a call be there."""
        self._batches[call] = micro_batches, lr

    def _take(self, micro: int) -> Sample:
        call, at = divmod(micro, self._program.m)
        return self._batches[call][0][at]

    def _forward(self, turn: Turn) -> None:
        self.versions.forward(turn.op)
        super()._forward(turn)

    def _backward(self, turn: Turn) -> None:
        self.versions.backward(turn.op)
        super()._backward(turn)

    def _weight(self, turn: Turn) -> None:
        self.versions.backward(turn.op)
        super()._weight(turn)
        self.versions.forget(turn.op)

    def _step(self, turn: Turn) -> None:
        """Take a step of this stage, on all ranks that have it."""
        engine, first = self._engine, turn.op.micro * self._per
        count = sum(self.counts.pop(i) for i in range(first, first + self._per))
        whole = self._stage.data.total(np.array([count]), "count")
        call = first // self._program.m
        lr = self._batches[call][1]
        if (first + self._per) % self._program.m == 0:
            del self._batches[call]
        divisor = max(1, int(whole[0]))
        problems, self.problems = [*self.problems, *engine.kept.problems()], []
        facts = engine.options.step_facts(lr=lr, steps=engine.steps)
        ready = reduced(engine.buckets, self._stage)
        norm, _ = agree(ready, engine.buckets, self._stage, problems, False, facts)
        self.norm = norm / divisor
        self.versions.advance(partial(engine._update, lr, 1.0 / divisor, self.norm))
        for bucket in engine.buckets:
            bucket.gradients.result = None


class Stream:
    """The part of the pipeline engine that runs schedules without a flush."""

    def __init__(self, engine: Any) -> None:
        """Cut the schedule into windows."""
        self._engine, self._stage = engine, engine.groups.of_stage()
        program = engine.program
        self._program, self._last = program, program.owner(program.depth - 1)
        self._windows = Windows(program.schedule, program.p, program.m, engine.stage)
        self.most_versions: int = 1
        self._failed = ""
        self.restart()

    def restart(self) -> None:
        """Begin with an empty pipeline."""
        self._calls, self._reported, self._failed = 0, np.full(3, np.nan), ""
        self._lrs: list[float] = []
        self._run = _Flow(self._engine, self._stage)

    def settle(self) -> None:
        """Wait until this rank has the newest parameters."""
        self._run.versions.settle()

    def step(self, micro_batches: Samples, lr: float) -> StepReport:
        """Run the window of a step; return the report of the step before."""
        if self._failed:
            raise ArgumentError(
                f"an earlier step has failed ({self._failed}) and left micro-batches in flight; "
                "make a new engine"
            )
        refused = refusal("lr", lr, "[0, inf)")
        sized, m = hasattr(micro_batches, "__len__"), self._program.m
        if not refused and sized and len(micro_batches) != m:
            refused = f"{len(micro_batches)} micro-batches, for a pipeline of {m}"
        start = time.perf_counter()
        most_micro_batches(micro_batches, self._stage, refused)
        self._run.add(self._calls, micro_batches, lr)
        self._lrs.append(float(lr))
        ops = self._windows.step(self._calls)
        self._calls += 1
        return self._go_on(ops, start, late=True)

    def flush(self) -> StepReport | None:
        """Finish what is in flight; return the report of the last step, None if there is none."""
        if not self._calls or self._failed:
            return None
        report = self._go_on(self._windows.drain(self._calls), time.perf_counter(), late=False)
        self.settle()
        self.restart()
        return report

    def _go_on(self, ops: Sequence[Op], start: float, late: bool) -> StepReport:
        ledger = self._engine.ledger
        wire, waits = Counter(ledger.wire), Counter(ledger.waits)
        ledger.reset_peak()
        try:
            with self._engine.ending():
                self._run.all(turns(self._program, ops))
                loss, samples = self._share_loss(late)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise
        self.most_versions = max(self.most_versions, self._run.versions.most)
        return StepReport(
            loss=loss / max(1, samples),
            samples=0 if math.isnan(samples) else int(samples),
            grad_norm=self._run.norm,
            skipped=False,
            loss_scale=1.0,
            bytes=ledger.sent_since(wire),
            waits=dict(ledger.waits - waits),
            peak_bytes=ledger.peak,
            peaks=dict(ledger.peaks),
            stored=dict(ledger.stored_peaks),
            seconds=time.perf_counter() - start,
        )

    def _share_loss(self, late: bool) -> tuple[float, float]:
        """Return the loss that was known before this call, or if not `late` that of the last step.

        The last stage tells the others, who listen one call later: nobody waits.
        """
        comm, last = self._engine.groups.pipeline.comm, self._last
        reported = [self._reported]
        if self._engine.stage == last:
            self._reported = self._sum_losses(late)
            reported.append(self._reported)
            for stage in range(self._program.p):
                if stage != last:
                    comm.send(self._reported, stage, LOSS_TAG)
        else:
            for number in range(min(1, self._calls - 1) if late else 2):
                message = np.empty(3)
                comm.recv(message, last, LOSS_TAG)
                reported.append(message)
                self._check_rate(message, newest=number == 1)
        if late:
            reported = reported[:1] if self._engine.stage == last else reported[-1:]
        loss, samples, _ = next((m for m in reversed(reported) if m[0] == m[0]), reported[0])
        return float(loss), float(samples)

    def _check_rate(self, message: np.ndarray, newest: bool) -> None:
        """Compare the learning rate of a step with that of the last stage."""
        theirs = message[2]
        if theirs != theirs:
            return
        own = self._lrs[-1] if newest else self._lrs.pop(0)
        if theirs != own:
            raise MismatchError(
                f"stage {self._last} took a step with lr={theirs:g}, stage {self._engine.stage} "
                f"with lr={own:g}"
            )

    def _sum_losses(self, late: bool) -> np.ndarray:
        """Return loss, samples and rate of the first step whose losses are all there, or NaN.

        If not `late`, those of the last step.
        """
        m, losses, order = self._program.m, self._run.losses, self._engine.options.order
        if not late:
            del losses[:-m]
            del self._lrs[:-1]
        if len(losses) < m:
            return np.full(3, np.nan)
        both = self._stage.data.total(sum_losses(losses[:m], order), "count", order)
        del losses[:m]
        return np.array([*both, self._lrs.pop(0)])


def check_options(name: str, options: Options) -> None:
    """Refuse options that need all stages to agree on a step.

    Raises:
        ArgumentError: Naming the option.
    """
    needs = {
        "clip_norm": options.clip_norm is not None,
        "loss_scale": options.scaling[1],
        "nonfinite='skip'": options.nonfinite == "skip",
        "hook": options.hook is not None,
    }
    if refused := [option for option, given in needs.items() if given]:
        raise ArgumentError(
            f"schedule={name!r} has no flush: stages take steps by themselves, so that "
            f"{', '.join(refused)}, for which all ranks agree, cannot be used with it"
        )

"""A step of one stage of a pipeline by the engine's own code, without elements and other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pycoll.parallel.analysis.dry_run import (
    DryStep,
    dry_kept,
    dry_options,
    dry_storage,
    dry_units,
    dry_update,
    held,
)
from pycoll.parallel.analysis.stand_ins import DryComm, DryLoss
from pycoll.parallel.analysis.traces import Arrays, traced
from pycoll.parallel.channels import Groups, Ledger
from pycoll.parallel.engine.agreement import Graphs
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.nn.layer import Model
from pycoll.parallel.pipeline.cuts import Cut
from pycoll.parallel.pipeline.engine import Pipeline
from pycoll.parallel.pipeline.program import Op, Schedule
from pycoll.parallel.pipeline.proof import prove
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.run import Run, Turn, turns
from pycoll.parallel.pipeline.windows import Windows
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.layout import unit_parameters


class _Transfers:
    """Moves nothing; what comes has the shapes of `forms`, by kind."""

    full = False

    def __init__(self, forms: Mapping[tuple[str, int], Any]) -> None:
        self._forms = forms

    def post(self, x: Any, to: int, tag: int, number: int = 0, **more: Any) -> None:
        pass

    def expect(self, source: int, tag: int, kind: Any) -> None:
        pass

    def receive(self, source: int, tag: int, kind: Any = None) -> tuple[Any, int]:
        return Arrays().make(self._forms.get(kind, 0.0)), 0

    def finish(self) -> None:
        pass


class _Stage(Pipeline):
    """The buckets and passes of one stage, made without asking other ranks."""

    def __init__(  # the collectives of the real one are left out
        self,
        model: Model,
        schedule: str | Schedule,
        micro_batches: int,
        cut: Cut,
        options: Options,
        axes: Mapping[str, int],
        stage: int,
        sample: Sample | None,
    ) -> None:
        self._schedule = find(schedule)
        self.program = prove(self._schedule.program(axes.get("pp", 1), micro_batches, 1)).program
        self.options, self.ledger = dry_options(options), Ledger()
        self.stage, self._cut = stage, cut
        self.loss_scale, self._stream = options.scaling[0], None
        self._graphs = Graphs(self.options.unused)
        self.storage: Any = dry_storage(self.options)
        self.kept, self.activations = dry_kept(options, self.ledger)
        comm: Any = DryComm(axes)
        self.groups = self.near = Groups(comm, self.ledger, known=self.AXES)
        units = self._make_units(model)
        owned = unit_parameters(units)
        self.parameters = [parameter for group in owned for parameter in group]
        recipe = options.recipe
        dtype = dtype_of(recipe.compute or recipe.parameter)
        traces = [] if sample is None else traced(units, sample, options)
        dry = dry_units(units, dtype, traces)
        self.buckets = self._make_buckets(dry, owned)
        self._passes = self._make_passes(model, DryLoss(*traces[-1:]), dry)
        self._inputs: Any = traces[0].x if traces else None
        trace = dict(zip((unit.name for unit in units), traces, strict=False))
        forms = dict[tuple[str, int], Any]()
        for chunk, names in enumerate(self.cuts if traces else ()):
            forms["x", chunk], forms["dx", chunk] = trace[names[-1]].y, trace[names[0]].dx
        self.transfers: Any = _Transfers(forms)

    def run(self) -> dict[str, int]:
        """Take a step, of a schedule without a flush as many as fill it; return what one sends."""
        before = Counter(self.ledger.wire)
        for passes in self._passes.values():
            passes.prepare()
        program = self.program
        run = _Run(self, lambda micro: (Arrays().make(self._inputs), None))
        steps: list[Sequence[Op]] = [program.stages[self.stage]]
        if self._schedule.steps > 1:
            windows = Windows(self._schedule, program.p, program.m, self.stage)
            steps = [windows.step(number) for number in range(windows.fill + 1)]
        for number, ops in enumerate(steps):
            before = Counter(self.ledger.wire) if number else before
            run.all(turns(program, ops))
        return self.ledger.sent_since(before)


class _Run(Run):
    """Takes a step of the stage where the program has one."""

    def _step(self, turn: Turn) -> None:
        dry_update(self._engine.buckets)
        for bucket in self._engine.buckets:
            bucket.gradients.result = None


def dry_pipeline(
    model: Model,
    schedule: str | Schedule,
    micro_batches: int,
    cut: Cut,
    options: Options,
    axes: Mapping[str, int],
    stage: int,
    sample: Sample | None = None,
) -> DryStep:
    """Run a step of a stage."""
    chosen = find(schedule)
    found = _Stage(model, schedule, micro_batches, cut, options, axes, stage, sample)
    rest = held(found.ledger)
    sent = found.run()
    proof = prove(chosen.program(axes.get("pp", 1), micro_batches))
    older = (proof.versions[stage] - 1) * rest["parameter"]
    layouts = [bucket.layout for bucket in found.buckets]
    counts = None if sample is None else found.activations
    return DryStep(layouts, rest, sent, found.ledger, counts, older, proof.live[stage])

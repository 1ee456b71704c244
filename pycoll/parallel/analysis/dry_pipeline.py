"""A step of one stage of a pipeline by the engine's own code, without elements and other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pycoll.parallel.analysis.dry_run import (
    DryComm,
    DryLayer,
    DryLoss,
    DryOptimizer,
    dry_storage,
    dry_update,
    held,
)
from pycoll.parallel.channels import Groups, Ledger
from pycoll.parallel.engine.offload import Kept
from pycoll.parallel.engine.options import Options
from pycoll.parallel.nn.layer import Model
from pycoll.parallel.pipeline.cuts import Cut
from pycoll.parallel.pipeline.engine import Pipeline
from pycoll.parallel.pipeline.program import Schedule
from pycoll.parallel.pipeline.proof import prove
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.run import Run, turns
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.layout import Layout, unit_parameters


class _Transfers:
    """Moves nothing."""

    def post(self, x: Any, to: int, tag: int, number: int = 0, **more: Any) -> None:
        pass

    def expect(self, source: int, tag: int, kind: Any) -> None:
        pass

    def receive(self, source: int, tag: int, kind: Any = None) -> tuple[float, int]:
        return 0.0, 0

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
    ) -> None:
        self.program = prove(find(schedule).program(axes.get("pp", 1), micro_batches, 1)).program
        self.options, self.ledger, self.stage, self._cut = options, Ledger(), stage, cut
        self.loss_scale, self._graphs, self._stream = options.scaling[0], {}, None
        self.transfers: Any = _Transfers()
        self.storage: Any = dry_storage(options)
        self.kept = Kept()
        comm: Any = DryComm(axes)
        self.groups = self.near = Groups(comm, self.ledger, known=self.AXES)
        units = self._make_units(model)
        owned = unit_parameters(units)
        self.parameters = [parameter for group in owned for parameter in group]
        recipe = options.recipe
        dtype = dtype_of(recipe.compute or recipe.parameter)
        dry: Any = [replace(u, layer=DryLayer(u.layer.parameters(), dtype)) for u in units]
        self.buckets = self._make_buckets(dry, owned)
        self._passes = self._make_passes(model, DryLoss(), dry)

    def run(self) -> None:
        """Take a step."""
        for passes in self._passes.values():
            passes.prepare()
        run = Run(self, lambda micro: (None, None))
        run.all(turns(self.program, self.program.stages[self.stage]))
        dry_update(self.buckets)


def dry_pipeline(
    model: Model,
    schedule: str | Schedule,
    micro_batches: int,
    cut: Cut,
    options: Options,
    axes: Mapping[str, int],
    stage: int,
) -> tuple[list[Layout], Counter[str], int, dict[str, int], float]:
    """Run a step of a stage.

    Returns:
        Layouts of its buckets, bytes held at rest by kind, at the peak, and sent by purpose, and
        how many micro-batches are live at most.
    """
    chosen = find(schedule)
    options = replace(options, optimizer=DryOptimizer(options.optimizer.slots), hook=None)
    options = replace(options, wrap=Options.wrap)
    found = _Stage(model, schedule, micro_batches, cut, options, axes, stage)
    rest = held(found.ledger)
    found.run()
    proof = prove(chosen.program(axes.get("pp", 1), micro_batches))
    older = (proof.versions[stage] - 1) * rest["parameter"]
    sent = found.ledger.sent_since(Counter())
    layouts = [bucket.layout for bucket in found.buckets]
    return layouts, rest, found.ledger.peak + older, sent, proof.live[stage]

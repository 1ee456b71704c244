"""A training step of the engine's own code, on arrays without elements and without other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycoll.parallel.analysis.stand_ins import (
    DryComm,
    DryLayer,
    DryLoss,
    DryOptimizer,
    DryStorage,
)
from pycoll.parallel.analysis.traces import Arrays, Trace
from pycoll.parallel.channels import Groups, Ledger
from pycoll.parallel.engine.offload import Kept, Offloaded
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.passes import Passes
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.bucket import Bucket, update_all
from pycoll.parallel.state.gradients import plan_sum
from pycoll.parallel.state.layout import Layout, Unit


@dataclass
class DryStep:
    """What a step has counted.

    Attributes:
        layouts: Layouts of the buckets.
        rest: Bytes held at rest, by kind.
        sent: Bytes sent, by purpose.
        ledger: Everything else.
        activations: Where activations are counted; None: nowhere.
        older: Bytes of older versions of the parameters.
        live: Of a pipeline: micro-batches that are live at most.
    """

    layouts: Sequence[Layout]
    rest: Counter[str]
    sent: dict[str, int]
    ledger: Ledger
    activations: Ledger | None
    older: int = 0
    live: float = 1.0


def dry_run(
    units: Sequence[Unit],
    layouts: Sequence[Layout],
    options: Options,
    axes: Mapping[str, int],
    micro_batches: int,
    traces: Sequence[Trace] = (),
) -> DryStep:
    """Run a step of rank 0."""
    ledger, recipe = Ledger(), options.recipe
    options = dry_options(options)
    groups: Any = Groups(DryComm(axes), ledger)  # type: ignore[arg-type]
    settings = replace(options.settings, storage=dry_storage(options))
    buckets = [Bucket(layout, settings, groups) for layout in layouts]
    dtype = dtype_of(recipe.compute or recipe.parameter)
    dry = dry_units(units, dtype, traces)
    kept, counts = dry_kept(options, ledger)
    passes = Passes(dry, buckets, DryLoss(*traces[-1:]), options, ledger, kept)
    rest = held(ledger)
    passes.prepare()
    plan = plan_sum(micro_batches, options.order)
    for j, term in enumerate(plan):
        *_, back = passes.run((Arrays().make(traces[0].x) if traces else None, None), 1.0)
        for bucket in buckets:
            bucket.gradients.begin(term, j == len(plan) - 1)
        passes.back(back)
        del back
    dry_update(buckets)
    sent = ledger.sent_since(Counter())
    return DryStep(layouts, rest, sent, ledger, counts if traces else None)


def dry_options(options: Options) -> Options:
    """Return options for layers that do nothing."""
    optimizer = DryOptimizer(options.optimizer.slots)
    return replace(options, optimizer=optimizer, hook=None, wrap=Options.wrap)


def dry_units(units: Sequence[Unit], dtype: Any, traces: Sequence[Trace]) -> list[Any]:
    """Return units whose layers do nothing."""
    found = []
    for i, unit in enumerate(units):
        layer: Any = DryLayer(unit.layer.parameters(), dtype, traces[i] if traces else None)
        found.append(replace(unit, layer=layer))
    return found


def held(ledger: Ledger) -> Counter[str]:
    """Return bytes in memory by kind, and as ``stored`` those in a file."""
    return Counter({**ledger.live, "stored": ledger.stored.total()})


def dry_storage(options: Options) -> DryStorage | None:
    """Return where states of the optimizer are; None: in memory."""
    return DryStorage(options.device == "cpu") if options.offloads("optimizer") else None


def dry_update(buckets: Sequence[Bucket]) -> None:
    """End a step."""
    for bucket in buckets[-1:]:
        bucket.prefetch()
    for bucket in buckets:
        bucket.gradients.finish().wait()
    update_all(buckets, 1, 0.0, 1.0)


class _Counted(Offloaded):
    """Counts what layers keep, all of which stays in memory."""

    def put(self, saved: Any) -> Any:
        """Count it."""
        return self.stay(saved)


def dry_kept(options: Options, ledger: Ledger) -> tuple[Kept, Ledger]:
    """Return what keeps activations that have shapes, and where it counts them.

    They count for the ledger of the engine if they are offloaded; else they do not, as there.
    """
    storage = DryStorage(options.device == "cpu")
    if options.offloads("activations"):
        return Offloaded(storage, ledger), ledger
    return _Counted(storage, own := Ledger()), own

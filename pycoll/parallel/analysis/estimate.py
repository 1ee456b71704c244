"""The bytes of a run, without running it: memory at rest, at its peak, and on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.kernels import EXACT_LIMBS
from pycoll.parallel.analysis.dry_pipeline import dry_pipeline
from pycoll.parallel.analysis.dry_run import DryStep, dry_run
from pycoll.parallel.analysis.traces import traced
from pycoll.parallel.channels import AXES, VOLUME, check_axis
from pycoll.parallel.compare import VOTE_WORDS
from pycoll.parallel.engine.options import Options, changed
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Model, ParameterSpec, Sequential
from pycoll.parallel.pipeline.cuts import Cut, checked
from pycoll.parallel.pipeline.engine import Pipeline
from pycoll.parallel.pipeline.program import Schedule
from pycoll.parallel.settings import check_number
from pycoll.parallel.state.layout import make_units, unit_parameters

_TOLD = 2  # numbers that the last stage tells all others


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        parameter: Parameters, at rest.
        gradient: Gradients, at rest.
        optimizer: Optimizer states, at rest.
        padding: How much of `at_rest` is padding.
        peak: Largest sum of parameters, gradients, states and buffers during a step, and if it is
            known and they are offloaded, of activations. What layers allocate inside is not in it.
        wire: Bytes sent in a step, by purpose; those between stages are not in it.
        live: Of a pipeline: activations that the stage holds at most, in micro-batches of all its
            layers.
        stored: Optimizer states that are in a file (`offload`), and so not in `optimizer`.
        activation: Largest sum of activations in memory during a step: what layers have kept for
            the backward pass. None: not known without a sample.
        stored_activation: Largest sum of activations in a file.
    """

    parameter: int
    gradient: int
    optimizer: int
    padding: int
    peak: int
    wire: dict[str, int]
    live: float = 1.0
    stored: int = 0
    activation: int | None = None
    stored_activation: int = 0

    @property
    def at_rest(self) -> int:
        """Bytes held between steps."""
        return self.parameter + self.gradient + self.optimizer

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameter,
            "gradients": self.gradient,
            "optimizer states": self.optimizer,
            **({"optimizer states in a file": self.stored} if self.stored else {}),
            "at rest": self.at_rest,
            "peak": self.peak,
            **({} if self.activation is None else {"activations": self.activation}),
            **({"activations in a file": stored} if (stored := self.stored_activation) else {}),
            **{f"sent per step: {purpose}": nbytes for purpose, nbytes in self.wire.items()},
        }
        return "\n".join(f"{name:30}{nbytes:>20,} B" for name, nbytes in parts.items())


class _Parameters:
    """A layer of which only the number of parameters is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def parameters(self) -> dict[str, ParameterSpec]:
        return {"all": ParameterSpec((self._count,))}


def estimate(
    model: Model | float,
    recipe: str | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    micro_batches: int = 1,
    schedule: str | Schedule | None = None,
    stage: int = 0,
    cut: Cut | None = None,
    options: Options | None = None,
    sample: Sample | None = None,
    **changes: Any,
) -> Estimate:
    """Return the bytes of one rank of `DataParallel`, or of `Pipeline`, with the same arguments.

    They are those that its ledger counts: layout and step are the engine's own code, run on arrays
    without elements. Parameters without gradients count as if they had some.

    Args:
        model: The model (its shapes are those of one ``tp`` rank), or the number of parameters.
        recipe: Name of a precision recipe; by default that of the options.
        mesh: The ranks, or sizes by axis, such as ``{"dp": 64}``; None: one rank.
        micro_batches: Micro-batches of a step on each rank.
        schedule: Of a pipeline, of which this is a `stage`; None: `DataParallel`.
        stage: Its number.
        cut: See `Pipeline`; of one that is cut by time its `cuts` have the names.
        options: As for `DataParallel`; hooks are not counted.
        sample: ``(inputs, targets)`` of a micro-batch, on which every layer runs once, so that
            activations can be counted. Layers that are split over ranks need all of these.
        changes: Options by name.

    Raises:
        ArgumentError: For what `DataParallel` would refuse, and a sample that layers cannot run on.
    """
    check_number("micro_batches", micro_batches, "[1, inf)", whole=True)
    changes = {**changes, **({} if recipe is None else {"precision": recipe})}
    options = changed(options, changes)
    axes = _axes(mesh, AXES if schedule is None else Pipeline.AXES)
    if isinstance(model, (int, float)):
        model = _one_layer(model, axes.get("tp", 1), sample)
    if schedule is None:
        units = make_units(model)
        layouts = options.layouts(unit_parameters(units), axes.get("dp", 1) * axes.get("cp", 1))
        traces = [] if sample is None else traced(units, sample, options)
        step = dry_run(units, layouts, options, axes, micro_batches, traces)
    else:
        check_number("stage", stage, f"[0, {axes.get('pp', 1)})", whole=True)
        where = _known(cut), options, axes, stage
        step = dry_pipeline(model, schedule, micro_batches, *where, sample)
    return _estimate(axes, 0 if schedule is None else _TOLD, step)


def _known(cut: Cut | None) -> Cut:
    """Return a cut, unless it has to be measured."""
    if (cut := checked(cut)) == "time":
        raise ArgumentError("cut='time' is measured; give the first names of engine.cuts[1:]")
    return cut


def _one_layer(count: float, ranks: int, sample: Sample | None) -> Model:
    """Return a model of a number of parameters, which ``tp`` ranks divide."""
    check_number("model", count, "[0, inf)")
    if sample is not None:
        raise ArgumentError("sample: a number of parameters has no layers to run on it")
    layer: Any = _Parameters(-(-int(count) // ranks))
    return Sequential([("model", layer)])


def _estimate(axes: dict[str, int], told: int, step: DryStep) -> Estimate:
    """Return what a dry run says about one rank."""
    rest = [step.rest[kind] for kind in ("parameter", "gradient", "optimizer")]
    count, padded = (sum(getattr(x, size) for x in step.layouts) for size in ("count", "padded"))
    wire = {**step.sent, **_agreement_bytes(axes, told)}
    activations = step.activations
    return Estimate(
        *rest,
        padding=sum(nbytes - nbytes * count // padded for nbytes in rest if nbytes),
        peak=step.ledger.peak + step.older,
        wire={purpose: nbytes for purpose, nbytes in wire.items() if nbytes},
        live=step.live,
        stored=step.rest["stored"],
        activation=None if activations is None else activations.peaks["activation"],
        stored_activation=step.ledger.stored_peaks["activation"],
    )


def _axes(mesh: Mesh | Mapping[str, int] | None, known: tuple[str, ...]) -> dict[str, int]:
    axes = dict(mesh.axes if isinstance(mesh, Mesh) else mesh or {})
    if any(not isinstance(size, int) or size < 1 for size in axes.values()):
        raise ArgumentError(f"mesh={axes}; accepted are sizes >= 1 by axis")
    for axis, size in axes.items():
        check_axis(axis, size, known)
    return axes


def _agreement_bytes(axes: Mapping[str, int], told: int) -> dict[str, int]:
    """Return the bytes with which ranks agree on counts, loss and norm."""
    world, data = prod(axes.values()), prod(axes.get(a, 1) for a in ("replica", "dp", "cp"))
    counts = VOLUME["all_gather"](world, 8 * world) + VOLUME["all_reduce"](data, 16)
    words = EXACT_LIMBS + told + VOTE_WORDS + 3
    return {"norm": VOLUME["all_reduce"](world, 8 * words), "count": counts}

"""The bytes of a run, without running it: memory at rest, at its peak, and on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.kernels import EXACT_LIMBS
from pycoll.parallel.analysis.dry_pipeline import dry_pipeline
from pycoll.parallel.analysis.dry_run import dry_run
from pycoll.parallel.channels import AXES, VOLUME, check_axis
from pycoll.parallel.compare import VOTE_WORDS
from pycoll.parallel.engine.options import Options
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
        peak: Largest sum of parameters, gradients, states and buffers during a step; activations
            and what layers allocate inside are not in it.
        wire: Bytes sent in a step, by purpose; those between stages are not in it.
        live: Of a pipeline: activations that the stage holds at most, in micro-batches of all its
            layers.
        stored: Optimizer states that are in a file (`offload`), and so not in `optimizer`.
    """

    parameter: int
    gradient: int
    optimizer: int
    padding: int
    peak: int
    wire: dict[str, int]
    live: float = 1.0
    stored: int = 0

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
        changes: Options by name.

    Raises:
        ArgumentError: For what `DataParallel` would refuse.
    """
    check_number("micro_batches", micro_batches, "[1, inf)", whole=True)
    changes = {**changes, **({} if recipe is None else {"precision": recipe})}
    options = replace(options or Options(), **changes)
    axes = _axes(mesh, AXES if schedule is None else Pipeline.AXES)
    if isinstance(model, (int, float)):
        check_number("model", model, "[0, inf)")
        layer: Any = _Parameters(-(-int(model) // axes.get("tp", 1)))
        model = Sequential([("model", layer)])
    if schedule is None:
        units = make_units(model)
        layouts = options.layouts(unit_parameters(units), axes.get("dp", 1) * axes.get("cp", 1))
        run = (layouts, *dry_run(units, layouts, options, axes, micro_batches), 1.0)
    else:
        cut = checked(cut)
        if cut == "time":
            raise ArgumentError("cut='time' is measured; give the first names of engine.cuts[1:]")
        check_number("stage", stage, f"[0, {axes.get('pp', 1)})", whole=True)
        run = dry_pipeline(model, schedule, micro_batches, cut, options, axes, stage)
    return _estimate(axes, 0 if schedule is None else _TOLD, *run)


def _estimate(
    axes: dict[str, int],
    told: int,
    layouts: Sequence[Any],
    live: Any,
    peak: int,
    sent: Any,
    active: float,
) -> Estimate:
    """Return what a dry run says about one rank."""
    rest = [live[kind] for kind in ("parameter", "gradient", "optimizer")]
    count, padded = (sum(getattr(each, size) for each in layouts) for size in ("count", "padded"))
    wire = {**sent, **_agreement_bytes(axes, told)}
    return Estimate(
        *rest,
        padding=sum(nbytes - nbytes * count // padded for nbytes in rest if nbytes),
        peak=peak,
        wire={purpose: nbytes for purpose, nbytes in wire.items() if nbytes},
        live=active,
        stored=live["stored"],
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

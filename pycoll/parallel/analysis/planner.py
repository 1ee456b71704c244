"""The fastest ways to divide a training run over ranks, by predicted time, that fit into memory.

States and buffers are those that `estimate` counts, exactly what the engine's ledger will count;
activations and operations are formulas (`workload`); collectives and transfers are simulated on a
described network; the bubble is that of the pipeline's program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.estimate import Estimate
from pycoll.parallel.analysis.layout_costs import LayoutCosts
from pycoll.parallel.analysis.layouts import Layout, Space, check_fixed
from pycoll.parallel.analysis.workload import Speed, Workload, workload
from pycoll.parallel.settings import check_number
from pycoll.schedule.cost.described import fabric

_PARTS = {
    "compute": "computation",
    "update": "updates of parameters",
    "recompute": "computing again",
    "tensor": "tensor-parallel sums",
    "context": "keys and values of other ranks",
    "offload": "what comes and goes that is offloaded",
    "bubble": "bubble and transfers of the pipeline",
    "data": "gradients and parameters that are not hidden",
}


@dataclass(frozen=True)
class Prediction:
    """What a layout is predicted to take.

    Attributes:
        layout: The layout.
        parts: Seconds of a step, by what they are spent on.
        bubble: Part of the pipeline's time in which its busiest stage waits.
        states: Bytes of the fullest rank, without activations; see `Estimate`.
        activations: Bytes of activations on that rank.
        sent: Bytes that a rank sends in a step along each axis.
        why: Why it is slower than the first; empty for that.
    """

    layout: Layout
    parts: dict[str, float]
    bubble: float
    states: Estimate
    activations: float
    sent: dict[str, float]
    why: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def memory(self) -> float:
        """Bytes of the fullest rank."""
        return self.states.peak + self.activations


def plan(
    model: Workload | Mapping[str, Any] | str,
    ranks: int,
    *,
    memory: float,
    batch: int,
    network: str = "rails",
    flops: float | Speed = 140e12,
    precision: str = "bf16",
    top: int = 5,
    fixed: Mapping[str, Any] | None = None,
) -> list[Prediction]:
    """List the fastest meshes for a training run, each with its best settings.

    Args:
        model: Sizes of a GPT: a `Workload`, a mapping, or a text; see `workload`.
        ranks: Number of ranks.
        memory: Bytes of each rank.
        batch: Sequences of a step, over all ranks.
        network: Its description, as for ``pycoll simulate``.
        flops: Floating-point operations per second that a rank achieves; or its `Speed`.
        precision: Name of a recipe.
        top: How many meshes.
        fixed: What is chosen already, by the names of `CHOICES`, such as ``{"tp": 8, "zero": 1}``.

    Raises:
        ArgumentError: For sizes that do not fit, or if no mesh fits into the memory.
    """
    for name, value in (("ranks", ranks), ("batch", batch), ("top", top)):
        check_number(name, value, "[1, inf)", whole=True)
    check_number("memory", memory, "(0, inf)")
    speed = flops if isinstance(flops, Speed) else Speed({1: flops})
    check_fixed(fixed or {}, speed.host_bytes > 0)
    work, joined = workload(model), fabric(network, ranks)
    space = Space(work, ranks, joined.near, batch, speed.host_bytes > 0, fixed or {})
    found = _fitting(LayoutCosts(work, joined, speed, precision), space, memory, top)
    if not found:
        raise ArgumentError(
            f"no mesh of {ranks} ranks with {memory / 1e9:g} GB each takes this model with a batch "
            f"of {batch} sequences{f' and {fixed}' if fixed else ''}; expected more ranks or memory"
        )
    best = sorted(found.values(), key=lambda each: each.seconds)[:top]
    return [best[0], *(_explained(each, best[0]) for each in best[1:])]


def _explained(prediction: Prediction, first: Prediction) -> Prediction:
    """Say what costs most of the time that a prediction takes longer than the first."""
    more = {name: seconds - first.parts[name] for name, seconds in prediction.parts.items()}
    most = max(more, key=more.__getitem__)
    slower = prediction.seconds / first.seconds - 1
    why = f"{slower:.1%} slower: {_PARTS[most]} {1e3 * more[most]:+.3g} ms"
    return replace(prediction, why=why)


def _fitting(
    costs: LayoutCosts, space: Space, memory: float, top: int
) -> dict[tuple[tuple[str, int], ...], Prediction]:
    """Return the fastest layout that fits of each of the fastest meshes, by its sizes."""
    timed = [(sum(costs.parts(each)[0].values()), i, each) for i, each in space.layouts()]
    found: dict[tuple[tuple[str, int], ...], Prediction] = {}
    for _, _, layout in sorted(timed, key=lambda each: each[:2]):
        mesh = tuple(layout.mesh.items())
        if mesh not in found and costs.least_memory(layout) <= memory:
            parts, bubble = costs.parts(layout, exact=True)
            held, sent = costs.memory(layout), costs.sent(layout)
            prediction = Prediction(layout, parts, bubble, *held, sent)
            if prediction.memory <= memory:
                found[mesh] = prediction
        if len(found) == 2 * top:  # bubbles were estimated until here: later may be faster
            break
    return found

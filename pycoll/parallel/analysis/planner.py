"""The fastest ways to divide a training run over ranks, by predicted time, that fit into memory.

States and buffers are those that `estimate` counts, exactly what the engine's ledger will count;
activations and operations are formulas (`workload`); collectives and transfers are simulated on a
described network; the bubble is that of the pipeline's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from pycoll.algorithms import find as find_algorithm
from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.estimate import Estimate, estimate
from pycoll.parallel.analysis.workload import Speed, Workload, workload
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.timing import Costs, simulate
from pycoll.parallel.precision import dtype_of, recipe
from pycoll.parallel.settings import check_number
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.groups import Groups
from pycoll.schedule.cost.simulate import simulate as simulate_collective

SCHEDULES = ("1f1b", "interleaved:2", "zb_h1")
CHOICES = ("dp", "pp", "tp", "micro_batch", "zero", "recompute", "schedule")
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Sizes of a micro-batch that are looked at, in sequences."""
MOST_OPERATIONS = 4096
"""Micro-batches times stages of which a pipeline is simulated whole."""
_PARTS = {
    "compute": "computation",
    "update": "updates of parameters",
    "recompute": "computing again",
    "tensor": "tensor-parallel sums",
    "bubble": "bubble and transfers of the pipeline",
    "data": "gradients and parameters that are not hidden",
}


@dataclass(frozen=True)
class Layout:
    """One way to divide a run.

    Attributes:
        mesh: Size of each axis, for `Mesh`.
        micro_batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a step on each rank.
        zero: ZeRO stage.
        recompute: What is computed again.
        schedule: Pipeline schedule; None: no pipeline.
    """

    mesh: dict[str, int] = field(hash=False)
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: str
    schedule: str | None

    @property
    def choices(self) -> dict[str, Any]:
        """What is chosen, by the names of `CHOICES`."""
        return self.mesh | {name: getattr(self, name) for name in CHOICES[3:]}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `DataParallel`, or with a pipeline of `Pipeline`.

        Sums are in any order, which keeps fewer of them than the tree does.
        """
        found = {"zero": self.zero, "recompute": self.recompute, "order": "any"}
        if self.schedule is None:
            return found
        return {**found, "schedule": self.schedule, "micro_batches": self.micro_batches}


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


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Refuse names that nothing can be fixed by.

    Raises:
        ArgumentError: With those that are known.
    """
    if odd := sorted(fixed.keys() - set(CHOICES)):
        raise ArgumentError(f"fixed: there is no {odd[0]!r} to fix; known: {', '.join(CHOICES)}")


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
    planner = _Planner(workload(model), fabric(network, ranks), batch, speed, precision)
    found = planner.fitting(memory, top, fixed or {})
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


class _Planner:
    """Everything that layouts of one run have in common."""

    def __init__(
        self, work: Workload, network: Fabric, batch: int, speed: Speed, precision: str
    ) -> None:
        self.work, self.network, self.batch, self.speed = work, network, batch, speed
        self.precision = precision
        kinds = recipe(precision)
        self.bytes = dtype_of(kinds.compute or kinds.parameter).itemsize
        self.gradient_bytes = dtype_of(kinds.gradient).itemsize
        self.collective_s = lru_cache(maxsize=None)(self._collective_s)
        self.transfer_s = lru_cache(maxsize=None)(self._transfer_s)
        self.timing = lru_cache(maxsize=None)(self._timing)
        self.estimated = lru_cache(maxsize=None)(self._estimated)
        self.roughly = lru_cache(maxsize=None)(self._roughly)

    @cached_property
    def parameters(self) -> int:
        return self.work.parameters

    def layouts(self) -> Iterator[tuple[int, Layout]]:
        """Yield all layouts, numbered: of equal ones the simplest comes first."""
        work, n, number = self.work, self.network.n, 0
        for tp in (t for t in _divisors(n) if not (work.heads % t or work.vocabulary % t)):
            for pp in (p for p in _divisors(n // tp) if p <= work.layers):
                dp = n // (tp * pp)
                for micro in MICRO_BATCHES:
                    if self.batch % (dp * micro):
                        continue
                    m = self.batch // (dp * micro)
                    for schedule in SCHEDULES if pp > 1 else (None,):
                        if not self._possible(schedule, pp, m):
                            continue
                        for recompute in ("none", "selective", "full"):
                            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                                axes = {"dp": dp, "pp": pp, "tp": tp}
                                yield number, Layout(axes, micro, m, zero, recompute, schedule)
                                number += 1

    def _possible(self, schedule: str | None, pp: int, m: int) -> bool:
        if schedule is None:
            return True
        chosen = find(schedule)
        return m >= max(pp, chosen.least(pp)) and pp * chosen.chunks <= self.work.layers

    def fitting(self, memory: float, top: int, fixed: Mapping[str, Any]) -> dict[Any, Prediction]:
        """Return the fastest layout that fits of each of the fastest meshes, by its sizes."""
        check_fixed(fixed)
        layouts = [(i, x) for i, x in self.layouts() if fixed.items() <= x.choices.items()]
        timed = [(sum(self.parts(each)[0].values()), i, each) for i, each in layouts]
        found: dict[tuple[int, ...], Prediction] = {}
        for _, _, layout in sorted(timed, key=lambda each: each[:2]):
            mesh = tuple(layout.mesh.values())
            if mesh not in found and self.least_memory(layout) <= memory:
                prediction = self.predict(layout)
                if prediction.memory <= memory:
                    found[mesh] = prediction
            if len(found) == 2 * top:  # bubbles were estimated until here: later may be faster
                break
        return found

    # --- Time -------------------------------------------------------------------------------------

    def parts(self, layout: Layout, exact: bool = False) -> tuple[dict[str, float], float]:
        """Return the seconds of a step by what they are spent on, and the bubble.

        The bubble is that of the pipeline's program if `exact`, else about as large.
        """
        work, mesh = self.work, layout.mesh
        tp, pp, b, m = mesh["tp"], mesh["pp"], layout.micro_batch, layout.micro_batches
        layers = work.layers / pp
        rate = b / tp / self.speed.flops_of(b / tp)
        forward = rate * (layers * work.layer_flops() + work.logits_flops() / pp)
        again = {"none": 0.0, "selective": work.attention_flops(), "full": work.layer_flops()}
        repeated = rate * layers * again[layout.recompute]
        size = work.sequence * b * work.hidden * self.bytes
        sums = layers * self.collective_s(tp, 1, size) if tp > 1 else 0.0
        ahead, back = 2 * sums, (4 if layout.recompute == "full" else 2) * sums
        parts = {
            "compute": 3 * m * forward,
            "recompute": m * repeated,
            "tensor": m * (ahead + back),
        }
        work_s, bubble = sum(parts.values()), 0.0
        parts["bubble"] = 0.0
        if layout.schedule is not None:
            transfer = self.transfer_s(tp, size)
            costs = (forward + ahead, forward + repeated + back, forward, transfer)
            chunks = 3 if layout.schedule == "zb_h1" else find(layout.schedule).chunks
            total = work_s + (pp - 1) * (sum(costs[:3]) / chunks + 2 * transfer)
            if exact:
                total, bubble = self.timing(layout.schedule, pp, m, costs)
            parts["bubble"] = max(0.0, total - work_s)
        shared = tp * pp * (mesh["dp"] if layout.zero else 1)
        parts["update"] = self.parameters / shared * self.speed.update_s
        parts["data"] = self._data_s(layout, m, forward + ahead, 2 * forward + repeated + back)
        return parts, bubble

    def _data_s(self, layout: Layout, m: int, ahead: float, back: float) -> float:
        """Return what sums over data-parallel ranks take beyond what passes hide."""
        dp, near = layout.mesh["dp"], layout.mesh["tp"] * layout.mesh["pp"]
        if dp == 1:
            return 0.0
        reduced = self.collective_s(dp, near, self.parameters / near * self.gradient_bytes)
        gathered = self.collective_s(dp, near, self.parameters / near * self.bytes)
        half, whole = reduced / 2, gathered / 2  # a reduce-scatter, and an all-gather
        if not self.speed.overlap:
            ahead = back = 0.0
        if layout.zero == 3:
            return max(0.0, m * (half + 2 * whole) - m * (ahead + back))
        if layout.zero == 2:
            return max(0.0, m * half - m * back) + whole
        if layout.zero == 1:
            return max(0.0, half - back) + whole
        return max(0.0, reduced - back)

    def _transfer_s(self, tp: int, nbytes: float) -> float:
        """Return the seconds of an activation from a stage to the next one."""
        chain = find_algorithm("broadcast", "direct").schedule(2)
        return float(simulate_collective(chain, nbytes, Groups.of(self.network, 2, tp)).max())

    def _collective_s(self, size: int, stride: int, nbytes: float) -> float:
        """Return the seconds of an all-reduce in all groups at once, by the faster of two ways."""
        group = Groups.of(self.network, size, stride)
        names = ("ring", "halving_doubling")
        schedules = [find_algorithm("all_reduce", name).schedule(size) for name in names]
        return min(float(simulate_collective(s, nbytes, group).max()) for s in schedules)

    def _timing(
        self, schedule: str, pp: int, m: int, costs: tuple[float, ...]
    ) -> tuple[float, float]:
        chosen = find(schedule)
        forward, backward, weight = (each / chosen.chunks for each in costs[:3])
        fewer = m if pp * m <= MOST_OPERATIONS else 2 * pp  # one pace, once all stages are busy
        program = chosen.program(pp, min(m, fewer), 1)
        timing = simulate(program, Costs(forward, backward, weight, costs[3]))
        total = timing.total + (m - min(m, fewer)) * sum(costs[:3])
        return total, timing.bubble / total

    # --- Memory -----------------------------------------------------------------------------------

    def predict(self, layout: Layout) -> Prediction:
        """Return what a layout takes, with the memory of its fullest stage."""
        mesh = layout.mesh
        parts, bubble = self.parts(layout, exact=True)
        pp, last = mesh["pp"], mesh["pp"] - 1
        stages = (0, last) if pp > 1 else (0,)
        fullest = max(
            ((self._states(layout, stage), self._activations(layout, stage)) for stage in stages),
            key=lambda each: each[0].peak + each[1],
        )
        return Prediction(layout, parts, bubble, *fullest, self._sent(layout))

    def _states(self, layout: Layout, stage: int) -> Estimate:
        mesh = tuple(layout.mesh.items())
        most = 3 * layout.mesh["pp"]  # further micro-batches find what these have left
        m = min(layout.micro_batches, most)
        return self.estimated(mesh, layout.zero, layout.recompute, m, layout.schedule, stage)

    def _estimated(
        self,
        mesh: tuple[tuple[str, int], ...],
        zero: int,
        recompute: str,
        m: int,
        schedule: str | None,
        stage: int,
    ) -> Estimate:
        axes = dict(mesh)
        given: dict[str, Any] = {"zero": zero, "recompute": recompute, "order": "any"}
        given["micro_batches"] = m
        if schedule is None:
            axes.pop("pp")
        else:
            given |= {"schedule": schedule, "stage": stage}
        return estimate(self.work.model(axes["tp"]), self.precision, axes, **given)

    def _activations(self, layout: Layout, stage: int) -> float:
        """Return the bytes of activations that a stage holds at most."""
        work, tp, pp, b = self.work, layout.mesh["tp"], layout.mesh["pp"], layout.micro_batch
        live = self._states(layout, stage).live if layout.schedule else 1.0
        kept = live * work.layers / pp * work.activation_bytes(b, tp, layout.recompute)
        one = work.activation_bytes(b, tp, "none") if layout.recompute != "none" else 0.0
        logits = work.logits_bytes(b, tp) if stage == pp - 1 else 0.0
        return (kept + one) * self.bytes / 2 + logits

    def least_memory(self, layout: Layout) -> float:
        """Return bytes that a layout needs at least, without counting each layer."""
        mesh = layout.mesh
        states = self.roughly(mesh["tp"] * mesh["pp"], mesh["dp"], layout.zero)
        kept = self.work.activation_bytes(layout.micro_batch, mesh["tp"], layout.recompute)
        return states + kept * self.work.layers / mesh["pp"] * self.bytes / 2

    def _roughly(self, parts: int, dp: int, zero: int) -> float:
        inner = self.work.layers * 12 * self.work.hidden**2 / parts  # of the blocks
        return estimate(inner, self.precision, {"dp": dp}, zero=zero).at_rest

    def _sent(self, layout: Layout) -> dict[str, float]:
        """Return the bytes that a rank sends in a step along each axis."""
        work, mesh, m = self.work, layout.mesh, layout.micro_batches
        dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
        size = float(work.sequence * layout.micro_batch * work.hidden * self.bytes)
        times = 6 if layout.recompute == "full" else 4
        chunks = find(layout.schedule).chunks if layout.schedule else 1
        own = self.parameters / (tp * pp) * (dp - 1) / dp
        scattered, gathered = own * self.gradient_bytes, own * self.bytes
        data = {
            0: 2 * scattered,
            1: scattered + gathered,
            2: m * scattered + gathered,
            3: m * (scattered + 2 * gathered),
        }
        return {
            "dp": data[layout.zero],
            "pp": 2 * m * size * chunks if pp > 1 else 0.0,
            "tp": m * work.layers / pp * times * 2 * (tp - 1) / tp * size,
        }


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

"""What a layout takes: seconds of a step, bytes sent, and bytes held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from pycoll.algorithms import find as find_algorithm
from pycoll.parallel.analysis.estimate import Estimate, estimate
from pycoll.parallel.analysis.layouts import Layout
from pycoll.parallel.analysis.workload import Speed, Workload
from pycoll.parallel.engine.offload import LAYERS
from pycoll.parallel.pipeline.registry import find
from pycoll.parallel.pipeline.timing import Costs, simulate
from pycoll.parallel.precision import dtype_of, recipe
from pycoll.schedule.cost.fabric import Fabric
from pycoll.schedule.cost.groups import Groups
from pycoll.schedule.cost.simulate import simulate as simulate_collective

MOST_OPERATIONS = 4096
"""Micro-batches times stages of which a pipeline is simulated whole."""
_COUNT = 1 << 20  # parameters of which states are counted, to know how many bytes each has


class LayoutCosts:
    """What layouts of one run take; all they have in common is kept."""

    def __init__(self, work: Workload, network: Fabric, speed: Speed, precision: str) -> None:
        """Take the model, what joins the ranks, how fast they are, and the recipe."""
        self.work: Workload = work
        self.network: Fabric = network
        self.speed: Speed = speed
        self.precision: str = precision
        kinds = recipe(precision)
        self.bytes: int = dtype_of(kinds.compute or kinds.parameter).itemsize
        self.gradient_bytes: int = dtype_of(kinds.gradient).itemsize
        self.collective_s: Callable[..., float] = lru_cache(maxsize=None)(self._collective_s)
        self.around_s: Callable[..., float] = lru_cache(maxsize=None)(self._around_s)
        self.transfer_s: Callable[..., float] = lru_cache(maxsize=None)(self._transfer_s)
        self.timing: Callable[..., tuple[float, float]] = lru_cache(maxsize=None)(self._timing)
        self.estimated: Callable[..., Estimate] = lru_cache(maxsize=None)(self._estimated)
        self.roughly: Callable[..., float] = lru_cache(maxsize=None)(self._roughly)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.work.parameters

    @cached_property
    def stored_bytes(self) -> float:
        """Bytes of a parameter that `Options.offload` keeps elsewhere."""
        return estimate(_COUNT, self.precision, offload="optimizer").stored / _COUNT

    # --- Time -------------------------------------------------------------------------------------

    def parts(self, layout: Layout, exact: bool = False) -> tuple[dict[str, float], float]:
        """Return the seconds of a step by what they are spent on, and the bubble.

        The bubble is that of the pipeline's program if `exact`, else about as large.
        """
        work, b, m = self.work, layout.micro_batch, layout.micro_batches
        tp, pp, cp = (layout.size(axis) for axis in ("tp", "pp", "cp"))
        layers, share = work.layers / pp, b / (tp * cp)
        rate = share / self.speed.flops_of(share)
        forward = rate * (layers * work.layer_flops() + work.logits_flops() / pp)
        again = {"none": 0.0, "selective": work.attention_flops(), "full": work.layer_flops()}
        repeated = rate * layers * again[layout.recompute]
        size = work.sequence / cp * b * work.hidden * self.bytes
        sums = layers * self.collective_s(tp, 1, size) if tp > 1 else 0.0
        waits, returns = (layers * each for each in self._context_s(layout, rate))
        times = 4 if layout.recompute == "full" else 2
        returns += waits * (times == 4)
        ahead, back = 2 * sums + waits, times * sums + returns
        stored = self._stored_s(layout, forward, 2 * forward + repeated)
        parts = {
            "compute": 3 * m * forward,
            "recompute": m * repeated,
            "tensor": m * (2 + times) * sums,
            "context": m * (waits + returns),
            "offload": m * sum(stored),
        }
        work_s, bubble = sum(parts.values()), 0.0
        parts["bubble"] = 0.0
        if layout.schedule is not None:
            transfer = self.transfer_s(tp, size)
            goes, comes = stored
            costs = (forward + ahead + goes, forward + repeated + back + comes, forward, transfer)
            chunks = 3 if layout.schedule == "zb_h1" else find(layout.schedule).chunks
            total = work_s + (pp - 1) * (sum(costs[:3]) / chunks + 2 * transfer)
            if exact:
                total, bubble = self.timing(layout.schedule, pp, m, costs)
            parts["bubble"] = max(0.0, total - work_s)
        updated = self.parameters / (tp * pp * (layout.size("dp", "cp") if layout.zero else 1))
        parts["update"] = updated * self.speed.update_s
        if layout.offloads("optimizer"):  # each is fetched and put back
            parts["offload"] += 2 * updated * self.stored_bytes / self.speed.host_bytes
        parts["data"] = self._data_s(layout, m, forward + ahead, 2 * forward + repeated + back)
        return parts, bubble

    def _stored_s(self, layout: Layout, ahead: float, back: float) -> tuple[float, float]:
        """Return what passes wait for activations that go elsewhere, and that come back.

        Each layer's go while the next ones run forward, and come while those above run backward.
        """
        if not layout.offloads("activations"):
            return 0.0, 0.0
        layers = self.work.layers / layout.size("pp")
        taken = layers * self._layer_bytes(layout, layout.recompute) / self.speed.host_bytes
        if not self.speed.overlap:
            return taken, taken
        return max(0.0, taken - ahead), max(0.0, taken - back)

    def _layer_bytes(self, layout: Layout, recompute: str) -> float:
        """Return the bytes of activations that a layer keeps of a micro-batch."""
        work = replace(self.work, sequence=self.work.sequence // layout.size("cp"))
        held = work.activation_bytes(layout.micro_batch, layout.size("tp"), recompute)
        return held * self.bytes / 2

    def _data_s(self, layout: Layout, m: int, ahead: float, back: float) -> float:
        """Return what sums over data-parallel ranks take beyond what passes hide."""
        group, near = layout.size("dp", "cp"), layout.size("tp", "pp")
        replicas = layout.size("replica")
        own, reduced, gathered, across = self.parameters / near, 0.0, 0.0, 0.0
        if group > 1:
            reduced = self.collective_s(group, near, own * self.gradient_bytes)
            gathered = self.collective_s(group, near, own * self.bytes)
        if replicas > 1:  # of what a rank has of the gradients, once a step
            part = own / group * self.gradient_bytes
            across = self.collective_s(replicas, near * group, part)
        half, whole = reduced / 2, gathered / 2  # a reduce-scatter, and an all-gather
        if not self.speed.overlap:
            ahead = back = 0.0
        if layout.zero == 3:
            return max(0.0, m * (half + 2 * whole) + across - m * (ahead + back))
        if layout.zero == 2:
            return max(0.0, m * half + across - m * back) + whole
        if layout.zero == 1:
            return max(0.0, half + across - back) + whole
        return max(0.0, reduced - back)

    def _context_s(self, layout: Layout, rate: float) -> tuple[float, float]:
        """Return what a layer waits for the keys and values of others, forward and backward.

        They go round while those at hand are used. The backward pass computes twice as much, and
        the gradients of keys and values go round, too, and home.
        """
        tp, pp, cp = (layout.size(axis) for axis in ("tp", "pp", "cp"))
        if cp == 1:
            return 0.0, 0.0
        values, gradients = self._moved(layout)
        hidden = rate * self.work.attention_flops() if self.speed.overlap else 0.0
        there = self.around_s(cp, tp * pp, cp * values) - hidden * (cp - 1) / cp
        home = cp / (cp - 1) * self.around_s(cp, tp * pp, cp * gradients) - hidden
        return max(0.0, there), max(0.0, there + home)

    def _moved(self, layout: Layout) -> tuple[float, float]:
        """Return the bytes of the keys and values of a rank in a layer, and of their gradients."""
        part = self.work.sequence / layout.size("cp") * layout.micro_batch
        count = 2 * part * self.work.hidden / layout.size("tp")
        return count * self.bytes, count * max(4, self.bytes)

    def _around_s(self, size: int, stride: int, nbytes: float) -> float:
        """Return the seconds in which the parts of all ranks of a group go round."""
        ring = find_algorithm("all_gather", "ring").schedule(size)
        return float(simulate_collective(ring, nbytes, Groups.of(self.network, size, stride)).max())

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

    def memory(self, layout: Layout) -> tuple[Estimate, float]:
        """Return the bytes of the fullest rank: without activations, and of these."""
        last = layout.size("pp") - 1
        stages = (0, last) if last else (0,)
        return max(
            (self._held(layout, stage) for stage in stages), key=lambda each: each[0].peak + each[1]
        )

    def _held(self, layout: Layout, stage: int) -> tuple[Estimate, float]:
        states = self._states(layout, stage)
        live = states.live if layout.schedule else 1.0
        return states, self._activations(layout, stage, live)

    def _states(self, layout: Layout, stage: int) -> Estimate:
        mesh = tuple(layout.mesh.items())
        most = 3 * layout.size("pp")  # further micro-batches find what these have left
        m = min(layout.micro_batches, most)
        saved = layout.zero, layout.recompute, layout.offload
        return self.estimated(mesh, saved, m, layout.schedule, stage)

    def _estimated(
        self,
        mesh: tuple[tuple[str, int], ...],
        saved: tuple[int, str, str],
        m: int,
        schedule: str | None,
        stage: int,
    ) -> Estimate:
        axes = dict(mesh)
        given: dict[str, Any] = dict(zip(("zero", "recompute", "offload"), saved, strict=True))
        given["order"] = "any"
        given["micro_batches"] = m
        if schedule is None:
            axes.pop("pp")
        else:
            given |= {"schedule": schedule, "stage": stage}
        return estimate(self.work.model(axes["tp"]), self.precision, axes, **given)

    def _activations(self, layout: Layout, stage: int, live: float) -> float:
        """Return the bytes of activations that a stage holds at most, of ``live`` micro-batches.

        A layer that runs backward has all it needs; in a pipeline all layers of a chunk have, from
        the backward pass to their input until that to their parameters.
        """
        pp, tokens = layout.size("pp"), self.work.sequence // layout.size("cp")
        layers, busy = live * self.work.layers / pp, 1.0
        if layout.schedule:
            busy = self.work.layers / pp / find(layout.schedule).chunks
        if layout.offloads("activations"):  # being written, at work, and read for the next
            layers = min(layers, LAYERS + max(2.0, busy))
        kept = layers * self._layer_bytes(layout, layout.recompute)
        one = busy * self._layer_bytes(layout, "none") if layout.recompute != "none" else 0.0
        work, last = replace(self.work, sequence=tokens), stage == pp - 1
        logits = work.logits_bytes(layout.micro_batch, layout.size("tp")) if last else 0.0
        return kept + one + logits

    def least_memory(self, layout: Layout) -> float:
        """Return bytes that a layout needs at least, without counting each layer."""
        data = layout.size("dp", "cp")
        states = self.roughly(layout.size("tp", "pp"), data, layout.zero, layout.offload)
        live = min(layout.size("pp"), layout.micro_batches)  # on the first stage
        return states + self._activations(layout, 0, live)

    def _roughly(self, parts: int, dp: int, zero: int, offload: str) -> float:
        inner = self.work.layers * 12 * self.work.hidden**2 / parts  # of the blocks
        return estimate(inner, self.precision, {"dp": dp}, zero=zero, offload=offload).at_rest

    def sent(self, layout: Layout) -> dict[str, float]:
        """Return the bytes that a rank sends in a step along each axis."""
        work, m = self.work, layout.micro_batches
        pp, tp, cp = (layout.size(axis) for axis in ("pp", "tp", "cp"))
        dp, replicas = layout.size("dp", "cp"), layout.size("replica")
        size = work.sequence / cp * layout.micro_batch * work.hidden * self.bytes
        times = 6 if layout.recompute == "full" else 4
        values, gradients = self._moved(layout)
        around = times // 2 * (cp - 1) * values + cp * gradients
        chunks = find(layout.schedule).chunks if layout.schedule else 1
        own = self.parameters / (tp * pp) * (dp - 1) / dp
        scattered, gathered = own * self.gradient_bytes, own * self.bytes
        shard = self.parameters / (tp * pp * dp) * self.gradient_bytes
        data = {
            0: 2 * scattered,
            1: scattered + gathered,
            2: m * scattered + gathered,
            3: m * (scattered + 2 * gathered),
        }
        return {
            "replica": 2 * (replicas - 1) / replicas * shard,
            "dp": data[layout.zero],
            "cp": m * work.layers / pp * around if cp > 1 else 0.0,
            "pp": 2 * m * size * chunks if pp > 1 else 0.0,
            "tp": m * work.layers / pp * times * 2 * (tp - 1) / tp * size,
        }

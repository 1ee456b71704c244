"""The data-parallel engine: plain data parallelism, ZeRO-1, 2 and 3, MiCS and HSDP.

One class, one table of placements. What a step does: the layers run forward and backward over the
micro-batches; buckets are reduced while the backward pass goes on; one exact norm is formed over
all ranks; the optimizer steps the elements that this rank keeps states for; parameters go back to
whoever needs them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pycoll import kernels
from pycoll.errors import ArgumentError
from pycoll.parallel import state
from pycoll.parallel.accumulate import Sums, turns
from pycoll.parallel.bucket import Bucket, Settings
from pycoll.parallel.checks import check_mesh, check_structure, gather_texts
from pycoll.parallel.groups import Groups
from pycoll.parallel.hooks import Hook
from pycoll.parallel.layer import Loss, Model
from pycoll.parallel.ledger import Ledger
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.optim import AdamW, Optimizer
from pycoll.parallel.passes import Passes, Sample
from pycoll.parallel.placement import PRESETS
from pycoll.parallel.precision import LossScale, Precision, dtype_of, recipe
from pycoll.parallel.units import make_layouts, make_units, unit_parameters


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        loss: Mean loss over all samples of all ranks.
        samples: Number of samples of all ranks.
        grad_norm: Norm of the mean gradient, before clipping; the same on every mesh.
        skipped: Whether parameters were left alone because a gradient had overflowed.
        loss_scale: Factor that the loss had.
        bytes: Bytes that this rank sent, by purpose.
        waits: Seconds that this rank waited for communication, by purpose.
        peak_bytes: Largest memory of parameters, gradients, states and buffers during the step.
        seconds: Time of the step.
    """

    loss: float
    samples: int
    grad_norm: float
    skipped: bool
    loss_scale: float
    bytes: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    seconds: float = 0.0


class DataParallel:
    """Trains a model whose samples are divided over the ranks of a mesh.

    ::

        engine = DataParallel(model, loss, Mesh(comm, dp=-1), zero=1, optimizer=AdamW(lr=3e-4))
        for batch in batches:
            report = engine.step(batch)  # a list of (inputs, targets), one for each micro-batch

    All ranks make the same calls. See docs/parallel.md for what each stage sends and keeps, and for
    which runs agree to the bit.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        mesh: Mesh,
        *,
        zero: int = 0,
        optimizer: Optimizer | None = None,
        order: str = "tree",
        bucket_bytes: int = 25 << 20,
        precision: str | Precision = "fp32",
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        hook: Hook | None = None,
        prefetch: int = 1,
        start: str = "check",
        nonfinite: str = "error",
        unused: str = "zero",
        fused: bool = True,
        wrap: Callable[[Any], Any] = lambda array: array,
    ) -> None:
        """Make buffers and states; a collective.

        Args:
            model: Layers; see `pycoll.parallel.layer`.
            loss: What to make small.
            mesh: The ranks. Samples are divided over ``replica`` and ``dp``; sharding is over
                ``dp``.
            zero: Stage: 0 replicates everything, 1 shards optimizer states, 2 gradients as well, 3
                parameters as well.
            optimizer: By default `AdamW`.
            order: Order of all sums: ``"tree"``, ``"rank"`` or ``"any"``.
            bucket_bytes: Gradient bytes reduced in one call; with stage 3 a bucket is a layer.
            precision: Name of a recipe, or one.
            loss_scale: By default 2**15 where the recipe needs one, else 1 and constant.
            clip_norm: Largest norm of the gradient; None: any.
            hook: What reduces buckets; see `pycoll.parallel.hooks`.
            prefetch: Layers that stage 3 gathers ahead.
            start: ``"check"``: raise if parameters differ between ranks; ``"broadcast"``: take
                those of the first; ``"trust"``.
            nonfinite: What to do about infinite gradients: ``"error"`` or ``"skip"`` the step;
                a scaled loss always skips.
            unused: Parameters without a gradient: ``"zero"``: count as zero; ``"error"``: raise if
                they are not those of the first micro-batch (a changed graph).
            fused: Use fused kernels; otherwise the same formulas in array operations.
            wrap: Makes of a NumPy array what the layers want, sharing memory; for instance
                ``torch.from_numpy``.

        Raises:
            ArgumentError: For a setting or a model that cannot be used, naming the parameter.
            MismatchError: If ranks have different models, settings or values.
        """
        if zero not in range(len(PRESETS)):
            raise ArgumentError(f"zero={zero!r}; accepted are 0, 1, 2 and 3")
        turns(1, order)
        self.precision, self.hook = recipe(precision), hook or Hook()
        self._check_hook(zero)
        self.optimizer, self.mesh, self.ledger = optimizer or AdamW(), mesh, Ledger()
        self.groups = Groups(mesh, self.ledger)
        scaled = LossScale() if self.precision.loss_scaling else LossScale(1.0, growth=1.0)
        self.loss_scale, self._scales = loss_scale or scaled, loss_scale or scaled.growth > 1
        self._clip, self._order, self._nonfinite, self._unused = clip_norm, order, nonfinite, unused
        self.steps = 0
        units = make_units(model)
        owned = unit_parameters(units)
        self.parameters = [parameter for group in owned for parameter in group]
        check_mesh(self.parameters, self.groups)
        facts = (
            f"{mesh!r}".split(", rank")[0] + f" zero={zero} optimizer={self.optimizer} "
            f"order={order} bucket_bytes={bucket_bytes} precision={self.precision.name} "
            f"clip_norm={clip_norm} prefetch={prefetch}"
        )
        check_structure(self.parameters, facts, self.groups.world)
        elements = max(1, bucket_bytes // dtype_of(self.precision.gradient).itemsize)
        shards = self.groups.parameters.world_size
        layouts = make_layouts(owned, shards, None if zero == 3 else elements)
        settings = Settings(PRESETS[zero], self.precision, order, self.optimizer, self.hook, fused)
        self.buckets = [Bucket(layout, settings, self.groups) for layout in layouts]
        state.initialise(self.buckets, self.groups, start)
        flying = {2: 2, 3: max(0, prefetch - 1)}.get(zero)
        self._passes = Passes(
            units,
            self.buckets,
            loss,
            self.precision.compute,
            prefetch if zero == 3 else 0,
            flying,
            self.ledger,
            wrap,
        )
        self._graph: frozenset[str] | None = None
        self._problems: list[str] = []

    def _check_hook(self, zero: int) -> None:
        name, kind = type(self.hook).__name__, self.precision.gradient
        if zero and not self.hook.shards:
            raise ArgumentError(f"{name} reduces whole buckets; use it with zero=0, not {zero}")
        if type(self.hook) is not Hook and dtype_of(kind).itemsize < 4:
            raise ArgumentError(f"{name} compresses float32; precision has {kind} gradients")

    def step(self, micro_batches: Sequence[Sample], lr: float | None = None) -> StepReport:
        """Train on one batch; a collective.

        Args:
            micro_batches: ``(inputs, targets)`` of this rank, one after the other. Ranks may have
                different numbers of micro-batches, or none, and of samples: the mean is over
                samples.
            lr: Learning rate of this step; by default the optimizer's.

        Raises:
            ArgumentError: On every rank: for gradients that are not finite, and with
                ``unused="error"`` for a changed graph, naming the parameters and the ranks.
        """
        start = time.perf_counter()
        wire, waits = Counter(self.ledger.wire), Counter(self.ledger.waits)
        self.ledger.reset_peak()
        loss, samples = self._accumulate(micro_batches)
        for pending in [bucket.gradients.finish() for bucket in self.buckets]:
            pending.wait()
        scale = self.loss_scale.value
        norm, overflow = self._agree(samples * scale)
        if not overflow:
            self._update(self.optimizer.lr if lr is None else lr, samples * scale, norm)
        if self._scales:
            self.loss_scale = self.loss_scale.after(overflow)
        for bucket in self.buckets:
            bucket.gradients.result = None
        sent: Counter[str] = Counter()
        for (purpose, _), nbytes in (self.ledger.wire - wire).items():
            sent[purpose] += nbytes
        return StepReport(
            loss,
            samples,
            norm,
            overflow,
            scale,
            dict(sent),
            dict(self.ledger.waits - waits),
            self.ledger.peak,
            time.perf_counter() - start,
        )

    def _accumulate(self, micro_batches: Sequence[Sample]) -> tuple[float, int]:
        """Run all micro-batches; return mean loss and number of samples of all ranks."""
        self._problems = []
        counts = self.groups.data.gather_rows(np.array([len(micro_batches)]), "count")
        plan = turns(int(counts.max()), self._order)
        if not plan:
            raise ArgumentError("no rank has a micro-batch")
        for bucket in self.buckets:
            bucket.gradients.reset()
        totals: Sums[Any] = Sums(np.zeros(2), partial(np.zeros, 2))
        for j, turn in enumerate(plan):
            sample = micro_batches[j] if j < len(micro_batches) else None
            loss, count, back = self._passes.run(sample, self.loss_scale.value)
            for bucket in self.buckets:
                bucket.gradients.begin(turn, j == len(plan) - 1)
            total = totals.begin(turn)
            total += (loss, count)
            totals.end(turn)
            self._passes.back(back)
            if sample is not None:
                self._check_graph(j)
        both = self.groups.data.all_reduce(totals.take(), "count", self._order).wait()
        return float(both[0] / max(1.0, both[1])), int(both[1])

    def _check_graph(self, j: int) -> None:
        """Note a problem if a micro-batch gave gradients of other parameters than the first."""
        arrived = frozenset().union(*(b.gradients.arrived for b in self.buckets))
        if self._graph is None:
            self._graph = arrived
        if self._unused == "error" and arrived != self._graph:
            names = ", ".join(sorted(arrived ^ self._graph))
            self._problems.append(
                f"a changed graph: in micro-batch {j} gradients of {names} came or stayed away, "
                "unlike in the first one"
            )

    def _agree(self, divisor: float) -> tuple[float, bool]:
        """Form the norm over all ranks, and agree whether anything is wrong.

        Returns:
            The norm of the mean gradient, and whether it overflowed.
        """
        limbs, bad = kernels.new_exact_sum(), set()
        own = set().union(*(bucket.gradients.bad for bucket in self.buckets))
        odd = sum(bucket.add_squares(limbs, bad) for bucket in self.buckets)
        vector = np.concatenate([limbs, [odd, bool(own), len(self._problems)]])
        self.groups.world.all_reduce(vector, "norm").wait()
        odd, blamed, problems = map(int, vector[-3:])
        if problems or (odd and not self._scales and self._nonfinite != "skip"):
            names = ", ".join(sorted(own if blamed else bad))
            if odd and names:
                fault = (
                    "gradients that are not finite" if blamed else "part of a sum that overflowed"
                )
                self._problems.append(f"{fault}, of {names}")
            self._refuse()
        norm = float(np.sqrt(kernels.exact_sum(vector[:-3]))) / max(1.0, divisor)
        return (float("inf") if odd else norm), odd > 0

    def _refuse(self) -> None:
        """Raise on every rank what any rank has found."""
        texts = gather_texts("; ".join(self._problems), self.groups.world)
        told = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts) if text)
        raise ArgumentError(f"step {self.steps + 1} was not taken: {told}")

    def _update(self, lr: float, divisor: float, norm: float) -> None:
        """Step all parameters with the clipped mean gradient."""
        self.steps += 1
        scale = 1.0 / max(1.0, divisor)
        if self._clip is not None and norm > self._clip:
            scale *= self._clip / norm
        for pending in [bucket.update(self.steps, lr, scale) for bucket in self.buckets]:
            pending.wait()

    def predict(self, x: Any) -> Any:
        """Return the output of the last layer; with stage 3 a collective."""
        return self._passes.predict(x)

    def gather(self) -> dict[str, np.ndarray]:
        """Return all parameters in full, by name, on every rank; a collective."""
        return state.gather_parameters(self.buckets, self.groups)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and optimizer states in full, independent of the mesh; a collective.

        Only ``"hook"``, what a compressing hook has not sent yet, belongs to this rank.
        """
        found = state.gather_states(self.buckets, self.groups)
        scale = (self.loss_scale.value, self.loss_scale.good_steps)
        return {"steps": self.steps, "loss_scale": scale, "hook": self.hook.state(), **found}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take what `state_dict` gave, perhaps on another mesh; not a collective.

        On another mesh drop its ``"hook"``.
        """
        state.load_states(self.buckets, self.groups, saved)
        self.hook.load(saved.get("hook", {}))
        self.steps = saved["steps"]
        value, good = saved["loss_scale"]
        self.loss_scale = type(self.loss_scale)(
            value, self.loss_scale.growth, self.loss_scale.backoff, self.loss_scale.interval, good
        )

    def close(self) -> None:
        """Close the engine's communicators; not a collective."""
        self.groups.close()

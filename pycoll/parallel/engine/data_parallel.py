"""The data-parallel engine: plain data parallelism, ZeRO-1, 2 and 3, MiCS and HSDP.

One class, one table of placements. In a step the layers run forward and backward over the
micro-batches; buckets are reduced while the backward pass goes on; all ranks form one exact norm;
the optimizer updates the elements that this rank keeps states for; updated parameters are gathered
by the ranks that need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, CollError, in_words
from pycoll.parallel.channels import Groups, Ledger
from pycoll.parallel.compare import gather_problems
from pycoll.parallel.engine.agreement import (
    Graphs,
    agree,
    check_mesh,
    check_parts,
    check_structure,
    most_micro_batches,
    reduced,
    take_sample,
)
from pycoll.parallel.engine.failure import Failure
from pycoll.parallel.engine.offload import Elsewhere, Kept, keeping
from pycoll.parallel.engine.options import Options, changed
from pycoll.parallel.engine.passes import Passes, Samples
from pycoll.parallel.engine.periods import Periods
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Loss, Model
from pycoll.parallel.precision import LossScale
from pycoll.parallel.settings import refusal
from pycoll.parallel.state import values
from pycoll.parallel.state.bucket import Bucket, Values, update_all
from pycoll.parallel.state.gradients import plan_sum, sum_losses
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Parameter, Unit, make_units, unit_parameters
from pycoll.parallel.state.parts import Part, hook_kind, hook_parts, own_parts, wanted_parts


class DataParallel:
    """Trains a model whose samples are divided over the ranks of a mesh.

    ::

        engine = DataParallel(model, loss, Mesh(comm, dp=-1), zero=1, optimizer=AdamW(lr=3e-4))
        for batch in batches:
            report = engine.step(batch)  # a list of (inputs, targets), one for each micro-batch

    All ranks make the same calls. See docs/parallel.md for what each stage sends and keeps, and for
    which runs agree to the bit.

    Attributes:
        options: The settings.
        ledger: The bytes of this rank.
        steps: Number of steps taken.
        loss_scale: Scale of the loss in the next step.
        parameters: All parameters, in forward order.
        hook: Reduces buckets.
        near: Groups of the ranks that reduce gradients; see `Periods`.
        storage: The file of what is offloaded, if anything.
        kept: Keeps what layers need in the backward pass.
        failure: What becomes of an error of this rank's own in a step.
        saving: The last save in the background, if any; see `pycoll.parallel.save`.
        EXPOSED: Whether the program can change parameters itself, between steps.
    """

    EXPOSED: bool = False
    AXES: tuple[str, ...] = ("replica", "dp", "cp", "tp")
    _TELLS = False  # whether one rank alone knows loss and samples until all agree on a step

    def __init__(
        self, model: Model, loss: Loss, mesh: Mesh, options: Options | None = None, **changes: Any
    ) -> None:
        """Make buffers and states; a collective.

        Args:
            model: Layers; see `pycoll.parallel.nn.layer`.
            loss: The loss to minimize.
            mesh: The ranks. Samples are divided over ``replica`` and ``dp``, their positions over
                ``cp``, shards over ``dp`` and ``cp``.
            options: Settings; by default those of `Options`.
            changes: Settings by name, which override `options`.

        Raises:
            ArgumentError: For a setting or a model that cannot be used, naming the parameter.
            MismatchError: If ranks have different models, settings or values.
        """
        options = changed(options, changes)
        self._check_loss(loss)
        self.options: Options = options
        self.mesh = mesh
        self.ledger: Ledger = Ledger()
        self.steps: int = 0
        self.saving: Any = None
        self._own_samples = 0  # of the running step
        self.loss_scale: LossScale
        self.loss_scale, self._scaled = options.scaling
        self._hook_scale = self.loss_scale.value  # of what the hook has not sent
        owned = unit_parameters(units := self._make_units(model))
        self.parameters: list[Parameter] = [parameter for group in owned for parameter in group]
        check_mesh(self.parameters, mesh)
        self.groups: Groups = Groups(mesh, self.ledger, options.device, self.AXES)
        try:
            self._prepare(model, loss, units, owned)
        except BaseException as error:
            # Mostly every rank has the same error of pycoll, and some still hear of it.
            self.groups.close(None if isinstance(error, CollError) else error)
            raise

    def _prepare(self, model: Model, loss: Loss, units: list[Unit], owned: Any) -> None:
        """Compare ranks, and make everything that the channels are needed for."""
        options, mesh = self.options, self.mesh
        facts = [f"mesh={mesh.axes}", *self._facts(), *options.facts()]
        check_structure(self.parameters, facts, self.groups.world)
        check_parts(units, self.groups)
        self._periods = Periods(options, self.groups)
        self.near: Groups = self._periods.near
        self.hook: Hook = options.settings.hook
        self.failure: Failure = Failure(self.near)
        self._open_storage(units, owned)
        self._periods.prepare(self.buckets)
        values.initialise(self.buckets, self.groups, options.start)
        self._passes = self._make_passes(model, loss, units)
        self._graphs = Graphs(options.unused)

    def _open_storage(self, units: Sequence[Unit], owned: Sequence[Sequence[Parameter]]) -> None:
        """Make the buckets, and what is not in memory."""
        options, problem = self.options, ""
        try:
            self.storage: Elsewhere
            self.kept: Kept
            self.storage, self.kept = keeping(options, self.ledger)
            self.buckets: list[Bucket] = self._make_buckets(units, owned)
        except OSError as error:
            if options.offload == "none":
                raise
            problem = f"no room in offload_dir={options.offload_dir!r}: {error}"
        if options.offload != "none" and (found := gather_problems(problem, self.groups.world)):
            raise ArgumentError(f"offload={options.offload!r}: {found}")

    def _make_units(self, model: Model) -> list[Unit]:
        return make_units(model)

    def _facts(self) -> list[str]:
        """Describe what has to be the same on all ranks besides the options."""
        return []

    def _make_buckets(
        self, units: Sequence[Unit], owned: Sequence[Sequence[Parameter]]
    ) -> list[Bucket]:
        """Make the buckets of the parameters that each unit owns."""
        storage = self.storage if self.options.offloads("optimizer") else None
        settings = replace(self.options.settings, storage=storage)
        layouts = self.options.layouts(owned, self.groups.shards.world_size)
        return [Bucket(layout, settings, self.near) for layout in layouts]

    def _check_loss(self, loss: Loss) -> None:
        if isinstance(loss, type) or not isinstance(loss, Loss):
            raise ArgumentError(f"loss={loss!r}; expected a loss, such as CrossEntropy()")

    def _make_passes(self, model: Model, loss: Loss, units: Sequence[Unit]) -> Any:
        more = self.options, self.ledger, self.kept, self.failure
        return Passes(units, self.buckets, loss, *more)

    def step(self, micro_batches: Samples, lr: float | None = None) -> StepReport:
        """Train on one batch; a collective.

        Args:
            micro_batches: ``(inputs, targets)`` of this rank, one after the other. Ranks may have
                different numbers of micro-batches, or none, and of samples: the mean is over
                samples. Ranks of one ``tp`` group are given the same ones.
            lr: Learning rate of this step; by default the optimizer's.

        Raises:
            ArgumentError: On every rank, for a wrong `lr` or wrong micro-batches, gradients that
                are not finite, and with ``unused="error"`` a changed graph.
            MismatchError: On every rank, for different rates, optimizers or, in a ``tp`` group,
                numbers of micro-batches.
            Exception: What a layer of this rank has raised. Others have an `ArgumentError` with its
                text; no rank has taken the step, and all can go on. With ``tp`` or ``cp`` others
                have `PeerLeft`, and the engine has ended.
        """
        self.failure.take()
        try:
            return self._step(micro_batches, lr)
        except CollError as error:
            told = error
        raise self.failure.take() or told

    def _step(self, micro_batches: Samples, lr: float | None) -> StepReport:
        """Take a step; what others say of one that failed may hide this rank's own error."""
        lr = self.options.optimizer.lr if lr is None else lr
        start, before = time.perf_counter(), self.ledger.mark()
        self._periods.begin(self.buckets, self.steps)
        more = {"lr": lr, "steps": self.steps, "loss_scale": self.loss_scale}
        facts = cache(partial(self.options.step_facts, **more))
        both, problems = self._accumulate(micro_batches, lr, facts)
        scale = self.loss_scale.value
        routine = self._scaled and not self.loss_scale.exhausted
        forgiving = routine or self.options.nonfinite == "skip"
        problems += self.kept.problems()
        for bucket in self.buckets[-1:]:
            bucket.prefetch()
        ready = self._reduced_buckets()
        told = both if self._TELLS else None
        norm, overflow = agree(ready, self.buckets, self.near, problems, forgiving, facts(), told)
        total, samples = float(both[0]), int(both[1])
        norm /= (divisor := max(1, samples) * scale)
        if not overflow:
            self.hook.settle()
            self._update(lr, 1.0 / divisor, norm)
        self.loss_scale = self.loss_scale.after(overflow)
        self._periods.end(self.buckets, self.steps)
        for bucket in self.buckets:
            bucket.gradients.result = None
        self.mesh.world.note_step(self._own_samples, (self.ledger.waits - before[1]).total())
        return StepReport(
            loss=total / max(1, samples),
            samples=samples,
            grad_norm=norm,
            skipped=overflow,
            loss_scale=scale,
            seconds=time.perf_counter() - start,
            own_samples=self._own_samples,
            **self.ledger.since(before),
        )

    def _accumulate(
        self, micro_batches: Samples, lr: Any, facts: Callable[[], str]
    ) -> tuple[np.ndarray, list[str]]:
        """Return sum of losses and samples of all ranks, and problems here; `facts` come later."""
        for bucket in self.buckets:
            bucket.gradients.reset()
        self._begin_hook()
        self._passes.prepare()
        most = most_micro_batches(micro_batches, self.near, refusal("lr", lr, "[0, inf)"))
        plan = plan_sum(most, self.options.order)
        problems, losses = list[str](), list[tuple[float, int]]()
        for j, term in enumerate(plan):
            sample = take_sample(micro_batches, j, self.failure, problems)
            loss, count, back = self._passes.run(sample, self.loss_scale.value)
            losses.append((loss, count))
            for bucket in self.buckets:
                bucket.gradients.begin(term, j == len(plan) - 1)
            self._passes.back(back)
            if sample is not None and self.failure.error is None:
                problems += self._graphs.problems(j, self.buckets)
        if self.failure.error is not None:
            problems = [in_words(self.failure.error)]
        self._own_samples = sum(count for _, count in losses)
        both = sum_losses(losses, self.options.order)
        return self.near.data.total(both, "count", self.options.order), problems

    def _reduced_buckets(self) -> Iterator[Bucket]:
        """Yield each bucket whose squares count on this rank, once its gradient is reduced."""
        return reduced(self.buckets, self.near)

    def _begin_hook(self) -> None:
        """Rescale what the hook has not sent to the next gradients."""
        self.hook.begin(self.loss_scale.value / self._hook_scale)
        self._hook_scale = self.loss_scale.value

    def _update(self, lr: float, scale: float, norm: float) -> None:
        """Update all parameters with the clipped mean gradient."""
        self._let_copy()
        self.steps += 1
        if (clip := self.options.clip_norm) is not None and norm > clip:
            scale *= clip / norm
        update_all(self.buckets, self.steps, lr, scale)

    def average(self) -> None:
        """Bring the replicas of `sync_every` together now; a collective.

        They become what they do after the last of so many steps, with `Gossip` the mean over all;
        the next period begins. Nothing happens if they are. ArgumentError without `sync_every`.
        """
        self._periods.average(self.buckets, self.steps)

    def _let_copy(self) -> None:
        """Wait until a save in the background has copied what is about to change."""
        if self.saving is not None:
            self.saving.copied.wait()

    def settle(self) -> None:
        """Wait until this rank has all parameters of the last step; not a collective."""
        for bucket in self.buckets:
            bucket.complete.wait()

    def predict(self, x: Any) -> Any:
        """Return the output of the last layer for ``x``; with stage 3 a collective.

        Raises:
            Exception: What a layer of this rank has raised; the others get their outputs. With
                ``tp`` or ``cp`` they have `PeerLeft`, and the engine has ended.
        """
        return self._passes.predict(x)

    def gather(self) -> dict[str, np.ndarray]:
        """Return all parameters in full, by name, on every rank; a collective."""
        self._periods.check_together()
        return values.gather_parameters(self.buckets, self.groups)

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the sums of the gradients of the last step by name: views of stage 0's buckets.

        The next step changes them. Not divided by samples or loss scale. ArgumentError with ZeRO.
        """
        if self.options.zero:
            raise ArgumentError(f"with zero={self.options.zero} each rank has only its shard")
        return values.gradients(self.buckets)

    @property
    def scaling(self) -> tuple[float, int] | None:
        """Scale of the loss, and good steps since it changed; None where it is of no use."""
        scale = self.loss_scale
        return (float(scale.value), int(scale.good_steps)) if self._scaled else None

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and optimizer states in full, independent of the mesh; a collective.

        Only ``"hook"``, what a compressing hook has not sent yet, belongs to this rank, named by
        ``"hook_of"``.
        """
        self._periods.check_together()
        self._begin_hook()
        found = values.gather_states(self.buckets, self.groups)
        if unsent := self.hook.state():
            found["hook_of"] = self.groups.place
        return {"steps": self.steps, "loss_scale": self.scaling, "hook": unsent, **found}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load ``saved`` of `state_dict`; a collective. On another mesh drop its ``"hook"``.

        Raises:
            ArgumentError: On every rank, if any state does not fit, or has another rank's hook.
            MismatchError: On every rank, if they differ.
        """
        self._let_copy()
        scale, hook = self.loss_scale, self.hook
        self.steps, self.loss_scale = values.restore(self.buckets, self.groups, scale, hook, saved)
        self._hook_scale = self.loss_scale.value
        self._periods.restart(self.steps)

    def parts(self) -> Iterator[Part]:
        """Return views of what this rank writes to a checkpoint; a collective.

        All ranks together have each element once; see `pycoll.parallel.checkpoint`.
        """
        self._periods.check_together()
        self._begin_hook()
        hook = hook_parts(self.hook.state(), hook_kind(self.groups.place, self.buckets))
        return chain(own_parts(self.buckets, self.groups), hook)

    def wanted(self) -> Iterator[Part]:
        """Return what this rank reads from a checkpoint: parts without data."""
        return wanted_parts(self.buckets, self.groups)

    def take(self, values: Values, steps: int, scale: LossScale) -> None:
        """Set state: ``values`` by kind, name, start and stop; ``steps`` and loss ``scale``."""
        self._let_copy()
        for bucket in self.buckets:
            bucket.fill(values)
        self.steps, self.loss_scale, self._hook_scale = steps, scale, scale.value
        self._periods.restart(self.steps)

    def close(self, error: BaseException | None = None) -> None:
        """Close the engine's communicators; with an ``error``, waiting peers raise, too.

        A save in the background is waited for; an error of it that nobody has heard of is raised.
        """
        try:
            if error is None:
                self.settle()
                if self.saving is not None and (failed := self.saving.failure()):
                    raise failed
        finally:
            self._let_copy()
            self.groups.close(error)
            if self.storage is not None:
                self.storage.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

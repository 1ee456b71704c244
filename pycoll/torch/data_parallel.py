"""Data parallelism for PyTorch modules: the buckets of `pycoll.parallel`, filled by autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from pycoll.errors import ArgumentError
from pycoll.parallel.compare import gather_problems
from pycoll.parallel.engine import data_parallel
from pycoll.parallel.engine.agreement import most_micro_batches
from pycoll.parallel.engine.failure import Failure
from pycoll.parallel.engine.options import Options
from pycoll.parallel.engine.report import StepReport
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.losses import sum_and_count
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.gradients import Gradients
from pycoll.parallel.state.layout import Unit
from pycoll.parallel.state.parts import Part
from pycoll.torch.modules.module_parameters import (
    Views,
    chain_of,
    full_name,
    part_of,
    precision_of,
    trainable,
)

LossFn = Callable[[Any, Any], tuple[torch.Tensor, int]]


class DataParallel(data_parallel.DataParallel):
    """Trains a PyTorch module on the CPUs of many ranks; stages 0, 1 and 2.

    ::

        def loss(output, targets):
            return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)

        engine = DataParallel(module, loss, Mesh(comm, dp=-1), zero=1, optimizer=AdamW(lr=3e-4))
        report = engine.step([(inputs, targets)])

    The module's parameters become views of the engine's buckets. Micro-batches are in the argument
    of `step`, so there is nothing like ``no_sync``. Gradients are reduced while autograd works on;
    buckets go in a fixed order, so ranks may use different parts of the module. Buffers, such as
    the running means of batch normalisation, stay with each rank. ``p.grad`` is the caller's: what
    backward passes outside of `step` leave there is neither counted nor touched by a step.
    """

    EXPOSED = True  # they are those of the module

    def __init__(
        self,
        module: torch.nn.Module,
        loss: LossFn,
        mesh: Mesh,
        options: Options | None = None,
        **changes: Any,
    ) -> None:
        """Take over a module; a collective.

        Args:
            module: Its trainable parameters are all float32, or all float64. Those of a
                `LayerModule` whose layer is split over ``mesh.tp`` are parts.
            loss: Returns the sum of the losses of a micro-batch, and the number of samples.
            mesh: The ranks.
            options: As for `pycoll.parallel.DataParallel`, without stage 3; the precision follows
                from the parameters.
            changes: Options by name.

        Raises:
            ArgumentError: For stage 3, parameters of other types or on other devices, and layers
                that are split on a mesh without ``tp``.
            MismatchError: If ranks have different modules, settings or values, or layers are split
                over other ranks than those of ``tp``.
        """
        if changes.get("zero", options.zero if options else 0) == 3:
            raise ArgumentError("zero=3 needs layers that parameters are handed to; use 0, 1 or 2")
        if changes.get("device", options.device if options else "cpu") != "cpu":
            raise ArgumentError("modules are trained on CPUs; device='cuda' is for layers")
        changes["precision"] = precision_of(module)
        both: Any = (module, loss)  # for `_make_passes`
        super().__init__(chain_of(module), both, mesh, options, **changes)

    def step(self, micro_batches: Sequence[Any], lr: float | None = None) -> StepReport:
        """Train on one batch; see `pycoll.parallel.DataParallel.step`.

        Raises:
            ArgumentError: Also on every rank, if a parameter of any was frozen when the engine was
                made and no longer is, or has another type, size or device.
        """
        if problem := self._passes.problem():  # the others hear of it in their first collective
            most_micro_batches(micro_batches, self.near, problem)
        report = super().step(micro_batches, lr)
        self.settle()  # the module's parameters are read without asking the engine
        return report

    def gather(self) -> dict[str, np.ndarray]:
        """Return all parameters; see `pycoll.parallel.DataParallel.gather`."""
        self._restore_views("parameters were not gathered")
        return super().gather()

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the training; see `pycoll.parallel.DataParallel.state_dict`."""
        self._restore_views("there is no state to save")
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take what `state_dict` gave; see `pycoll.parallel.DataParallel.load_state_dict`."""
        self._restore_views("the saved state was not loaded")
        super().load_state_dict(saved)

    def parts(self) -> Iterator[Part]:
        """Return what this rank saves; see `pycoll.parallel.DataParallel.parts`."""
        self._restore_views("nothing was saved")
        return super().parts()

    def _restore_views(self, otherwise: str) -> None:
        """Make parameters views of the buckets again; a collective, which fails on all ranks."""
        if reported := gather_problems(self._passes.problem(), self.groups.world):
            raise ArgumentError(f"{otherwise}: {reported}")
        self._passes.prepare()

    def _check_loss(self, loss: Any) -> None:
        if not callable(loss[1]):
            raise ArgumentError(f"loss={loss[1]!r}; expected a function of output and targets")

    def _make_passes(self, model: Any, loss: Any, units: Sequence[Unit]) -> Any:
        return _AutogradPasses(*loss, self.buckets, self.failure)


def _notify(owner: Any, name: str, p: torch.Tensor) -> None:
    """Tell the engine, if it still exists: no collector sees a cycle through a hook."""
    if (engine := owner()) is not None:
        engine.take(name, p)


class _AutogradPasses:
    """Runs a module; takes gradients from hooks."""

    def __init__(
        self, module: torch.nn.Module, loss: LossFn, buckets: Sequence[Bucket], failure: Failure
    ) -> None:
        self._module, self._loss, self._buckets = module, loss, buckets
        self._failure = failure
        self._arrived: dict[str, np.ndarray] = {}
        self._handed: set[str] = set()
        self._next = 0
        named = {full_name(name): p for name, p in trainable(module).items()}
        self._parameters = tuple(named.values())
        self._places: dict[str, Gradients] = {}
        self._inside = False  # whether the backward pass of a micro-batch runs
        places = {
            entry.parameter.name: (bucket, entry)
            for bucket in buckets
            for entry in bucket.layout.entries
        }
        parts = []
        for full, p in named.items():
            bucket, entry = places[full]
            view = entry.view(bucket.parameter.data)
            parts.append(part_of(full, p, view.reshape(-1)))
            self._places[full] = bucket.gradients
            p.register_post_accumulate_grad_hook(partial(_notify, weakref.ref(self), full))
        frozen = {k: p for k, p in module.named_parameters() if not p.requires_grad}
        self._views = Views("engine", module, frozen, parts)

    def problem(self) -> str:
        """Return why this rank cannot take a step; see `Views`."""
        return self._views.problem()

    def prepare(self) -> None:
        """Make parameters views of the buckets: the user may have moved them."""
        self._views.move_back()

    def run(self, sample: Any, scale: float) -> tuple[float, int, Any]:
        """Run the module forward; see `pycoll.parallel.engine.passes.Passes.run`."""
        self._next = 0
        self._arrived.clear()  # a step that failed may have left something
        self._handed.clear()
        if sample is not None:
            with self._failure, torch.enable_grad():  # the caller may have turned it off
                total, count = sum_and_count(self._loss(self._module(sample[0]), sample[1]))
                return float(total.detach()), count, total * scale
        return 0.0, 0, None

    def back(self, total: torch.Tensor | None) -> None:
        """Run autograd; parameters that it does not reach have no gradient."""
        if total is not None and total.requires_grad:  # not if it uses no trainable parameter
            own = [p.grad for p in self._parameters]  # of the user's own passes, which do not count
            for p in self._parameters:
                p.grad = None
            self._inside = True
            try:
                with self._failure:
                    total.backward()
            finally:
                self._inside = False
                for p, grad in zip(self._parameters, own, strict=True):
                    p.grad = grad
        for bucket in self._buckets[self._next :]:
            self._hand_over(bucket)

    def predict(self, x: Any) -> Any:
        """Run the module forward, without gradients."""
        with torch.no_grad():
            return self._module(x)

    def take(self, name: str, p: torch.Tensor) -> None:
        """Take a gradient of a step; reduce the buckets that are complete, in their order.

        Raises:
            ArgumentError: If the parameter had one in this pass, and its bucket is being reduced.
        """
        if not self._inside:
            return  # a backward pass of the user's
        grad = p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
        p.grad = None
        if name in self._arrived:
            self._arrived[name] = self._arrived[name] + grad.numpy()
        elif name in self._handed:
            raise ArgumentError(
                f"parameter {name} got another gradient in the same backward pass, when its bucket "
                "had gone to the other ranks; run each part of the module in one pass (checkpoint "
                "with use_reentrant=False)"
            )
        else:
            self._arrived[name] = grad.numpy()
            self._places[name].check(name, grad)
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if any(e.parameter.name not in self._arrived for e in bucket.layout.entries):
                return
            self._hand_over(bucket)
            self._next += 1

    def _hand_over(self, bucket: Bucket) -> None:
        for entry in bucket.layout.entries:
            name = entry.parameter.name
            self._handed.add(name)
            bucket.gradients.add(name, self._arrived.pop(name, None))

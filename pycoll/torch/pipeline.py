"""Pipelines of PyTorch modules: the schedules and the engine of `pycoll.parallel`.

Each child of a `torch.nn.Sequential` becomes a layer whose parameters are handed to it. So they may
be sharded, and old versions of them kept, which autograd would refuse for a module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycoll.errors import ArgumentError
from pycoll.parallel.engine.options import Options, changed
from pycoll.parallel.engine.passes import Sample
from pycoll.parallel.mesh import Mesh
from pycoll.parallel.nn.layer import Grads, ParameterSpec, Params
from pycoll.parallel.nn.layer import Sequential as Chain
from pycoll.parallel.pipeline import engine
from pycoll.parallel.pipeline.cuts import Cut
from pycoll.parallel.pipeline.program import Schedule
from pycoll.torch.modules.module_parameters import precision_of, trainable

LossFn = Callable[[Any, Any], tuple[torch.Tensor, int]]


class Pipeline(engine.Pipeline):
    """Trains a `torch.nn.Sequential` whose children are divided over the stages of a pipeline.

    ::

        def loss(output, targets):
            return torch.nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)

        engine = Pipeline(module, loss, Mesh(comm, dp=2, pp=2), "1f1b", micro_batches=8, zero=1)
        report = engine.step(batch)  # 8 pairs (inputs, targets)
        engine.write_back()  # the parameters are in the module again

    Every rank makes the same module. Autograd forms all gradients of a child in B; W only adds
    them, so that schedules that delay W gain nothing. With `recompute` children must not draw
    random numbers. Buffers stay with each rank.
    """

    def __init__(
        self,
        module: torch.nn.Sequential,
        loss: LossFn,
        mesh: Mesh,
        schedule: str | Schedule = "1f1b",
        micro_batches: int = 8,
        cut: Cut | None = None,
        options: Options | None = None,
        *,
        sample: Sample | None = None,
        **changes: Any,
    ) -> None:
        """Take the parameters of a module; a collective.

        Args:
            module: Its children pass one tensor on. Trainable parameters are all float32, or all
                float64, on the CPU.
            loss: Returns the sum of the losses of a micro-batch, and the number of samples.
            mesh: The ranks; stages lie along ``pp``.
            schedule: See `pycoll.parallel.Pipeline`.
            micro_batches: Micro-batches of a step, on each rank.
            cut: See `pycoll.parallel.Pipeline`; names are those of children.
            options: As for `pycoll.parallel.Pipeline`; the precision follows from the parameters.
            sample: With ``cut="time"``: the micro-batch on which every child is timed.
            changes: Options by name.

        Raises:
            ArgumentError: For what is no `Sequential`, parameters of several types, and offload of
                activations, which autograd keeps.
        """
        if not isinstance(module, torch.nn.Sequential):
            raise ArgumentError(
                f"module is a {type(module).__name__}; expected a torch.nn.Sequential, whose "
                "children are divided over the stages"
            )
        self._module = module
        changes |= {"precision": precision_of(module), "wrap": torch.from_numpy}
        given = changed(options, changes)
        if given.offloads("activations"):
            raise ArgumentError(
                f"offload={given.offload!r}: autograd keeps what the backward pass needs, and lets "
                "nobody move it; offload='optimizer' moves states"
            )
        more = (schedule, micro_batches, cut, given)
        super().__init__(_chain(module), _Loss(loss), mesh, *more, sample=sample)

    def write_back(self) -> None:
        """Copy all parameters into the module, on every rank; a collective."""
        found, own = self.gather(), trainable(self._module)
        with torch.no_grad():
            for name, value in found.items():
                own[name].copy_(torch.from_numpy(value))


def _chain(module: torch.nn.Sequential) -> Chain:
    """Return the children as layers; a parameter of two of them belongs to the first."""
    owners: dict[torch.Tensor, str] = {}
    layers = []
    for name, child in module.named_children():
        tied = {local: owners.setdefault(p, f"{name}.{local}") for local, p in _own(child).items()}
        layers.append((name, _ModuleLayer(name, child, tied)))
    return Chain(layers)


def _own(child: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in child.named_parameters() if p.requires_grad}


class _ModuleLayer:
    """A module as a layer; see `pycoll.parallel.nn.layer.Layer`."""

    def __init__(self, name: str, module: torch.nn.Module, owners: dict[str, str]) -> None:
        self._name, self._module = name, module
        self._specs = dict[str, ParameterSpec]()
        for local, p in _own(module).items():
            owner, value = owners[local], p.detach().numpy()
            tied_to = None if owner == f"{name}.{local}" else owner
            self._specs[local] = ParameterSpec(
                value.shape, str(value.dtype), lambda _, value=value: value, tied_to=tied_to
            )

    def parameters(self) -> dict[str, ParameterSpec]:
        return self._specs

    def forward(self, params: Params, x: Any) -> tuple[Any, Any]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        x = torch.as_tensor(x).detach()
        if x.is_floating_point():
            x.requires_grad_()
        with torch.enable_grad():
            y = torch.func.functional_call(self._module, leaves, (x,))
        if not isinstance(y, torch.Tensor):
            raise ArgumentError(
                f"child {self._name} returned a {type(y).__name__}; children pass one tensor on"
            )
        return y.detach(), {"y": y, "x": x, "leaves": leaves}

    def backward_input(self, params: Params, saved: Any, dy: Any) -> Any:
        y, x, leaves = saved.pop("y"), saved.pop("x"), saved.pop("leaves")
        wanted = [*([x] if x.requires_grad else []), *leaves.values()]
        found: list[Any] = [None] * len(wanted)
        if y.requires_grad:
            found = list(torch.autograd.grad(y, wanted, torch.as_tensor(dy), allow_unused=True))
        dx = found.pop(0) if x.requires_grad else None
        saved["found"] = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        return torch.zeros_like(x) if dx is None and x.requires_grad else dx

    def backward_weight(self, params: Params, saved: Any, dy: Any) -> Grads:
        if "found" not in saved:
            self.backward_input(params, saved, dy)
        return saved.pop("found")


class _Loss:
    """A function of tensors as a loss; see `pycoll.parallel.nn.layer.Loss`."""

    def __init__(self, function: LossFn) -> None:
        self._function = function

    def forward(self, logits: Any, targets: Any) -> tuple[float, int, Any]:
        leaf = torch.as_tensor(logits).detach().requires_grad_()
        with torch.enable_grad():
            total, count = self._function(leaf, torch.as_tensor(targets))
        return float(total.detach()), int(count), (total, leaf)

    def backward(self, saved: Any, scale: float) -> Any:
        total, leaf = saved
        return torch.autograd.grad(total * scale, leaf)[0]

"""The layers of `pycoll.parallel` as PyTorch modules, the tensor-parallel ones among them.

A module calls the same explicit forward and backward that run on NumPy arrays; autograd sees one
function. So a split layer has the right backward pass, and what it sends is that of docs/layers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.nn import initial
from pycoll.parallel.nn.layer import Layer, ParameterSpec
from pycoll.parallel.random import Cursor
from pycoll.parallel.tensor.layers import VocabParallelCrossEntropy
from pycoll.parallel.tensor.regions import Region
from pycoll.torch.backend.patches import do_not_compile


class LayerModule(torch.nn.Module):
    """A layer as a module, with its parameters under their own names.

    ::

        up = LayerModule(ColumnParallelLinear(512, 2048, key.fold("up"), mesh.tp))
        down = LayerModule(RowParallelLinear(2048, 512, key.fold("down"), mesh.tp))
        y = down(torch.nn.functional.gelu(up(x)))

    There is no second derivative: a backward pass with ``create_graph=True`` raises RuntimeError.

    Attributes:
        layer: The layer.
        comm: The tensor-parallel ranks, if given.
        specs: What the layer says of each parameter.
    """

    def __init__(self, layer: Layer, comm: Communicator | None = None) -> None:
        """Make the parameters; every rank has its part of those that are split.

        Args:
            layer: The layer.
            comm: The tensor-parallel ranks; needed if the layer sees part of a sequence, to add the
                gradients of parameters that all ranks have.

        Raises:
            ArgumentError: If `comm` is needed and missing, or a parameter is tied to that of
                another layer.
        """
        super().__init__()
        self.layer = layer
        self.comm = comm
        self.specs: dict[str, ParameterSpec] = layer.parameters()
        for name, spec in self.specs.items():
            if spec.tied_to:
                raise ArgumentError(
                    f"parameter {name} is tied to {spec.tied_to}, which a module of its own cannot "
                    "see: make the layer without tied_to (GPT with tied=False), and share the "
                    f"parameter by hand: module.{name} = model.{spec.tied_to}"
                )
        partial = [name for name, spec in self.specs.items() if spec.sequence]
        if partial and comm is None:
            raise ArgumentError(f"gradients of {', '.join(partial)} are partial: pass comm")
        for name, value in initial(layer).items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for step in path:
                if step not in owner._modules:
                    owner.add_module(step, torch.nn.Module())
                owner = owner.get_submodule(step)
            owner.register_parameter(last, torch.nn.Parameter(torch.from_numpy(value)))

    def train(self, mode: bool = True) -> LayerModule:
        """Turn dropout on or off, as `eval` does, for all layers that have a cursor of this one.

        The cursors are those in the attribute ``cursor`` of the layer, and of the layers that it is
        made of if it has them in ``layers`` as a `Chain` does.
        """
        for cursor in _cursors(self.layer):
            cursor.training = mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return _Apply.apply(self, x, *(self.get_parameter(name) for name in self.specs))

    def gradients(self, saved: Any, params: dict[str, Any], dy: torch.Tensor) -> Sequence[Any]:
        """Return the gradients of the input and of the parameters, in order."""
        dx = self.layer.backward_input(params, saved, dy)
        found = self.layer.backward_weight(params, saved, dy)
        for name, spec in self.specs.items():
            if spec.sequence and self.comm is not None and self.comm.world_size > 1:
                found[name] = self.comm.all_reduce(found[name])
        return dx, *(found.get(name) for name in self.specs)


def _cursors(layer: Any) -> Iterator[Cursor]:
    if isinstance(cursor := getattr(layer, "cursor", None), Cursor):
        yield cursor
    parts = getattr(layer, "layers", ())
    for part in parts if isinstance(parts, (list, tuple)) else ():
        yield from _cursors(part[1] if isinstance(part, tuple) else part)


def _save(ctx: Any, values: Any) -> None:
    """Save tensors in lists, tuples and dicts with autograd, and all else beside them.

    Autograd notices changes in place, and checkpoints release its tensors. It does not see tensors
    in objects of other types, which a layer of the user's might save.
    """
    leaves, ctx.structure = tree_flatten(values)
    kinds = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    ctx.save_for_backward(*(x if kind else None for x, kind in zip(leaves, kinds, strict=True)))
    ctx.others = [None if kind else x for x, kind in zip(leaves, kinds, strict=True)]


def _saved(ctx: Any) -> Any:
    both = zip(ctx.saved_tensors, ctx.others, strict=True)
    leaves = [other if tensor is None else tensor for tensor, other in both]
    return tree_unflatten(leaves, ctx.structure)


def _refuse_second_derivative() -> None:
    # Autograd runs a backward pass with gradients enabled if it has to be differentiable itself.
    # What happens in here is not recorded, so the second derivative would lack a part, silently.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this function of pycoll has no second derivative: go backward without "
            "create_graph=True"
        )


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: LayerModule, x: torch.Tensor, *values: Any) -> torch.Tensor:
        names = module.layer.parameters()
        params = {name: value.detach() for name, value in zip(names, values, strict=True)}
        inner = x.detach()
        y, saved = module.layer.forward(params, inner)
        ctx.module = module
        _save(ctx, (params, saved))
        return x.view_as(x) if y is inner else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        _refuse_second_derivative()
        module, ctx.module = ctx.module, None  # what a layer has saved may be used once
        if module is None:
            raise RuntimeError("a layer goes backward once for each time it went forward")
        params, saved = _saved(ctx)
        ctx.others = None  # the graph may be held for longer
        return None, *module.gradients(saved, params, dy.contiguous())


def cross(x: torch.Tensor, region: Region, comm: Communicator) -> torch.Tensor:
    """Take an activation over a boundary of `pycoll.parallel.tensor.regions`; differentiable, once.

    Args:
        x: The activation.
        region: The boundary, such as ``tensor.COPY`` before a column-parallel layer of your own.
        comm: The tensor-parallel ranks.
    """
    return _Cross.apply(x, region, comm)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region, comm: Communicator) -> torch.Tensor:
        ctx.region, ctx.comm = region, comm
        inner = x.detach()
        y = region.forward(inner, comm)
        return x.view_as(x) if y is inner else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        _refuse_second_derivative()
        return ctx.region.backward(dy.contiguous(), ctx.comm), None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, comm: Communicator, ignore_index: int = -100
) -> torch.Tensor:
    """Return the mean cross-entropy of logits ``[..., vocabulary / n]``; differentiable, once.

    Args:
        logits: This rank's columns.
        targets: Integers ``[...]`` of [0, vocabulary), or `ignore_index`.
        comm: The tensor-parallel ranks.
        ignore_index: Target of rows that do not count.
    """
    return _Loss.apply(logits, targets, VocabParallelCrossEntropy(comm, ignore_index))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any, loss: VocabParallelCrossEntropy) -> Any:
        total, count, saved = loss.forward(logits.detach(), targets)
        ctx.loss, ctx.count = loss, max(1, count)
        _save(ctx, saved)
        return logits.new_tensor(total / ctx.count)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        _refuse_second_derivative()
        return ctx.loss.backward(_saved(ctx), float(dy) / ctx.count), None, None


do_not_compile(LayerModule.forward, cross, vocab_parallel_cross_entropy)

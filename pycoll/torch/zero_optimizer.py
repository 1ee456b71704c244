"""A PyTorch optimizer whose states are divided over the ranks (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycoll import kernels
from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.checks import check_unanimous, vote
from pycoll.parallel.ledger import Channel, Ledger
from pycoll.parallel.limits import check_number
from pycoll.parallel.placement import Placed, Placement, own_block
from pycoll.parallel.units import Layout, bucket_elements, make_layouts, make_units, unit_parameters
from pycoll.torch.data_parallel import chain_of, full_name, move_back, trainable


@dataclass
class _Flat:
    """One bucket: parameters and gradients in full, and this rank's block of both."""

    layout: Layout
    parameter: np.ndarray
    gradient: np.ndarray
    shard: torch.Tensor
    shard_gradient: np.ndarray


_PLAIN = (type(None), bool, int, float, complex, str, tuple, np.generic, torch.Tensor)


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """Return what has to be the same on all ranks, as text: learning rates and the like."""
    groups = [
        ", ".join(f"{k}={v}" for k, v in sorted(group.items()) if _is_plain(k, v))
        for group in optimizer.param_groups
    ]
    return "; ".join(groups)


def _is_plain(name: str, value: Any) -> bool:
    """Tell what reads alike on all ranks from objects whose text is their address."""
    return name != "params" and isinstance(value, _PLAIN)


class ZeroOptimizer:
    """Averages gradients over the ranks and steps one block of the parameters on each.

    ::

        optimizer = ZeroOptimizer(torch.optim.AdamW, module, comm, lr=3e-4)
        for inputs, targets in batches:
            loss(module(inputs), targets).backward()  # several times, to accumulate
            optimizer.step()
            optimizer.zero_grad()

    Each rank keeps 1 / n of the optimizer states, and sends what plain data parallelism sends:
    2 (n - 1) / n of the gradients. Gradients and parameters are views of flat buckets. The
    optimizer must treat every element alike (SGD, Adam, AdamW, RMSprop, ...; not LAMB or LARS).
    Learning rates and states are those of `inner`, which schedulers take. Before `step` gradients
    are those of this rank: clip them with `clip_norm`, not ``clip_grad_norm_``. A parameter without
    gradient has the gradient zero: weight decay and momentum go on.
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        module: torch.nn.Module,
        comm: Communicator,
        *,
        bucket_bytes: int = 25 << 20,
        order: str = "tree",
        clip_norm: float | None = None,
        **settings: Any,
    ) -> None:
        """Take over the parameters of a module; a collective.

        All ranks get the parameters of rank 0.

        Args:
            kind: Class of the optimizer, which steps this rank's blocks.
            module: Its trainable parameters are on the CPU and of one type.
            comm: The ranks.
            bucket_bytes: Gradient bytes that are reduced in one call.
            order: Order of the sum over ranks.
            clip_norm: Largest norm of the averaged gradient; None: any.
            settings: Further arguments of `kind`.

        Raises:
            ArgumentError: For parameters of several types or on other devices.
        """
        if clip_norm is not None:
            check_number("clip_norm", clip_norm, "(0, inf]")
        model = chain_of(module)
        self.ledger, self._order, self._clip = Ledger(), order, clip_norm
        self._channel = Channel(comm.dup(), "dp", self.ledger)
        self._params = {full_name(name): p for name, p in trainable(module).items()}
        first = next(iter(self._params.values())).detach().numpy()
        owned, n = unit_parameters(make_units(model)), self._channel.world_size
        layouts = make_layouts(owned, n, bucket_elements(1, bucket_bytes, first.itemsize))
        self._flats = [self._make_flat(layout, first.dtype) for layout in layouts]
        self.inner = kind([flat.shard for flat in self._flats], **settings)

    def _make_flat(self, layout: Layout, dtype: np.dtype) -> _Flat:
        channel = self._channel
        parameter, gradient = (
            channel.empty(layout.padded, dtype, what) for what in ("parameter", "gradient")
        )
        parameter[...] = gradient[...] = 0
        for entry in layout.entries:
            p = self._params[entry.parameter.name]
            parameter[entry.start : entry.stop] = p.detach().numpy().reshape(-1)
            p.data = torch.from_numpy(parameter[entry.start : entry.stop]).view(p.shape)
        channel.comm.broadcast(parameter, out=parameter)
        shard = torch.from_numpy(own_block(parameter, channel.rank, channel.world_size))
        reduced = channel.empty(layout.padded // channel.world_size, dtype, "gradient")
        shard.grad = torch.from_numpy(reduced)
        flat = _Flat(layout, parameter, gradient, shard, reduced)
        self._point(flat, keep=False)
        return flat

    def _point(self, flat: _Flat, keep: bool) -> None:
        """Make gradients views of the bucket: copy what lies elsewhere; what is missing is 0."""
        for entry in flat.layout.entries:
            p, part = self._params[entry.parameter.name], flat.gradient[entry.start : entry.stop]
            view, grad = torch.from_numpy(part).view(p.shape), p.grad if keep else None
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.to_dense()
            if grad is not None and grad.data_ptr() == view.data_ptr():
                continue
            part[...] = 0 if grad is None else grad.numpy().reshape(-1)
            p.grad = view

    def _move_back(self, flat: _Flat) -> None:
        """Take parameters that were given other memory (``p.data = ...``) into the bucket again."""
        for entry in flat.layout.entries:
            p, part = self._params[entry.parameter.name], flat.parameter[entry.start : entry.stop]
            move_back(entry.parameter.name, p, part)

    def step(self) -> float:
        """Average the gradients, step, and hand out the parameters; a collective.

        Returns:
            Norm of the averaged gradient, before clipping.

        Raises:
            ArgumentError: On every rank, if the gradient is not finite; no parameter has changed.
                Also if a parameter has another type than at the start.
            MismatchError: On every rank, if their optimizers have different settings; likewise.
        """
        n = self._channel.world_size
        for flat in self._flats:
            self._move_back(flat)
            self._point(flat, keep=True)
        pending = [
            Placed(flat.gradient, Placement.PARTIAL, self._channel, "gradient").to(
                Placement.SHARD, "gradient", self._order, flat.shard_gradient
            )
            for flat in self._flats
        ]
        limbs, odd = kernels.new_exact_sum(), 0
        for flat, work in zip(self._flats, pending, strict=True):
            work.wait()
            odd += kernels.add_squares(flat.shard_gradient, limbs)
        settings = _settings(self.inner)
        vector = np.concatenate([limbs, vote(settings), [odd]])
        self._channel.all_reduce(vector, "norm").wait()
        limbs, votes, odd = vector[: limbs.size], vector[limbs.size : -1], vector[-1]
        check_unanimous(votes, settings, self._channel)
        if odd:
            raise ArgumentError(f"the step was not taken: {odd} gradients are not finite")
        norm = float(np.sqrt(kernels.exact_sum(limbs))) / n
        scale = 1 / n if self._clip is None or norm <= self._clip else self._clip / norm / n
        for flat in self._flats:
            flat.shard_gradient *= flat.shard_gradient.dtype.type(scale)
        self.inner.step()
        handed = [
            Placed(flat.shard.numpy(), Placement.SHARD, self._channel, "parameter").to(
                Placement.REPLICATE, "parameter", out=flat.parameter
            )
            for flat in self._flats
        ]
        for work in handed:
            work.wait()
        return norm

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Make all gradients zero; they stay views of the buckets, whatever `set_to_none` says."""
        for flat in self._flats:
            flat.gradient[...] = 0
            self._point(flat, keep=True)

    def close(self) -> None:
        """Close the communicator; not a collective."""
        self._channel.comm.close()

"""Optimizers: formulas in array operations, and the fused passes that give the same bits.

An optimizer works on flat vectors: the part of the parameters that this rank updates. It holds no
states itself; they are passed in, like parameters to layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pycoll import kernels
from pycoll.errors import ArgumentError
from pycoll.parallel.settings import check_number, check_numbers


def is_optimizer(given: Any) -> bool:
    """Tell whether something has what an `Optimizer` has, and is no class."""
    return hasattr(given, "update") and hasattr(given, "slots") and not isinstance(given, type)


class Optimizer(Protocol):
    """Updates parameters.

    Ranks compare their optimizers: class and public attributes (``_x`` is private), or
    ``__repr__`` if the class has one.
    """

    @property
    def lr(self) -> float:
        """Learning rate, unless a step is given another."""
        ...

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the states that each parameter has, all of its shape and zero at first."""
        ...

    def update(self, args: UpdateArgs, fused: bool = True) -> None:
        """Step one vector in place.

        Args:
            args: The vectors and scalars.
            fused: Use the fused kernel; otherwise array operations.
        """
        ...


@dataclass
class UpdateArgs:
    """The arguments of one update."""

    step: int  # from 1 on
    lr: float
    param: Any  # in the state type, ``[count]``; updated
    grad: Any  # of any floating-point type
    slots: dict[str, Any]  # states by name; updated
    scale: float = 1.0  # of the gradient
    decay: bool = True  # whether weight decay applies
    copy: Any = None  # the new parameter is also written here, in a 16-bit type

    def scaled(self) -> tuple[Any, type]:
        """Return the gradient in the state type, times its factor, and that type."""
        kind = self.param.dtype.type
        return self.grad.astype(kind) * kind(self.scale), kind


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum if wanted.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013, section 2.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_numbers(self, lr="[0, inf)", momentum="[0, 1]", weight_decay="[0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the states."""
        return ("momentum",) if self.momentum else ()

    def update(self, args: UpdateArgs, fused: bool = True) -> None:
        """Step one vector in place, of ``args``, ``fused`` or not; see `Optimizer.update`."""
        decay = self.weight_decay if args.decay else 0.0
        buffer = args.slots.get("momentum")
        if fused:
            numbers = {"rate": args.lr, "beta": self.momentum, "decay": decay}
            common = {"nesterov": self.nesterov, "scale": args.scale, "copy": args.copy}
            kernels.sgd(args.param, args.grad, buffer, **numbers, **common)
            return
        g, kind = args.scaled()
        p, rate, beta = args.param, kind(args.lr), kind(self.momentum)
        g = g + p * kind(decay)
        if buffer is not None:
            buffer[...] = buffer * beta + g
            g = g + buffer * beta if self.nesterov else buffer
        p[...] = p - rate * g
        if args.copy is not None:
            args.copy[...] = p


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_numbers(self, lr="[0, inf)", eps="[0, inf)", weight_decay="[0, inf)")
        if len(self.betas) != 2:
            raise ArgumentError(f"there are {len(self.betas)} betas; expected 2")
        for i, beta in enumerate(self.betas):
            check_number(f"betas[{i}]", beta, "[0, 1)")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the states."""
        return ("first_moment", "second_moment")

    def update(self, args: UpdateArgs, fused: bool = True) -> None:
        """Step one vector in place, of ``args``, ``fused`` or not; see `Optimizer.update`."""
        beta1, beta2 = self.betas
        keep = 1 - args.lr * self.weight_decay if args.decay else 1.0
        rate = args.lr / (1 - beta1**args.step)
        root = 1 / math.sqrt(1 - beta2**args.step)
        m, v = args.slots["first_moment"], args.slots["second_moment"]
        if fused:
            numbers = {"rate": rate, "keep": keep, "beta1": beta1, "beta2": beta2, "root": root}
            common = {"eps": self.eps, "scale": args.scale, "copy": args.copy}
            kernels.adamw(args.param, args.grad, m, v, **numbers, **common)
            return
        g, kind = args.scaled()
        p = args.param
        p[...] = p * kind(keep)
        m[...] = m * kind(beta1) + g * kind(1 - beta1)
        v[...] = v * kind(beta2) + (g * g) * kind(1 - beta2)
        p[...] = p - kind(rate) * (m / (np.sqrt(v) * kind(root) + kind(self.eps)))
        if args.copy is not None:
            args.copy[...] = p


def linear_scale(lr: float, batch: int, base: int) -> float:
    """Scale ``lr``, tuned for a batch of ``base`` samples, to ``batch``: lr * batch / base.

    Source: Goyal et al., "Accurate, large minibatch SGD", arXiv 1706.02677, section 2.1.
    """
    return lr * batch / base


@dataclass(frozen=True)
class WarmupCosine:
    """Learning rate that rises linearly and then falls along a cosine; call it with the step.

    Source: Goyal et al., section 2.2; Loshchilov and Hutter, "SGDR", ICLR 2017, section 3.

    Attributes:
        peak: Largest rate, at step `warmup`.
        warmup: Steps of the rise.
        total: Step from which the rate is `floor`.
        floor: Smallest rate.
    """

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_numbers(self, peak="[0, inf)", floor="[0, inf)")
        check_numbers(self, warmup="[0, inf)", total="[0, inf)")

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        left = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * left)) / 2


@dataclass(frozen=True)
class WarmupLinear:
    """Learning rate that rises linearly and then stays; call it with the step.

    Attributes:
        peak: The rate after the rise.
        warmup: Steps of the rise.
        start: Rate at step 0.
    """

    peak: float
    warmup: int
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_numbers(self, peak="[0, inf)", warmup="[0, inf)", start="[0, inf)")

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        part = min(1.0, step / max(1, self.warmup))
        return self.start + (self.peak - self.start) * part

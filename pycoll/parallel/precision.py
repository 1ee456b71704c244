"""Number formats of a training run: named recipes, and the scale of the loss.

A recipe says in which type each copy of a parameter is kept. Its cost in bytes per parameter, with
AdamW's two moments, is in its name's table below; the same numbers feed the memory estimator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.settings import check_numbers


@dataclass(frozen=True)
class Precision:
    """Types of a training run.

    Attributes:
        name: Name of the recipe.
        parameter: Type of the parameters that layers see and that all-gathers move.
        gradient: Type of the gradients, as accumulated and as reductions move them.
        state: Type of the optimizer states.
        master: Whether the optimizer keeps a copy of the parameters in `state`.
        gradient_copy: Whether the optimizer keeps a copy of the gradients in `state`.
        compute: Type that parameters and inputs are converted to for the layers; empty: as stored.
        loss_scaling: Whether small gradients need a scaled loss.
    """

    name: str
    parameter: str
    gradient: str
    state: str = "float32"
    master: bool = False
    gradient_copy: bool = False
    compute: str = ""
    loss_scaling: bool = False


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Precision("fp32", "float32", "float32"),
        Precision("fp64", "float64", "float64", state="float64"),
        Precision("fp16", "float16", "float16", master=True, loss_scaling=True),
        Precision("bf16", "bfloat16", "float32", master=True, compute="float32"),
        Precision(
            "fp16_copy", "float16", "float16", master=True, gradient_copy=True, loss_scaling=True
        ),
    )
}
"""The recipes; bytes per parameter with AdamW are 16, 32, 16, 18 and 20.

``fp16`` is the mixed precision of the ZeRO paper, ``bf16`` has gradients in float32, ``fp16_copy``
converts the gradients to float32 before they are used, as early mixed-precision trainers did.
"""


def recipe(name: str | Precision) -> Precision:
    """Look a recipe up.

    Raises:
        ArgumentError: If there is none of that name.
    """
    if isinstance(name, Precision):
        return name
    if name not in RECIPES:
        raise ArgumentError(f"precision={name!r} is not known; accepted: {', '.join(RECIPES)}")
    return RECIPES[name]


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy type of a name; bfloat16 comes from the ml_dtypes package.

    Raises:
        ArgumentError: If bfloat16 is wanted and ml_dtypes is missing.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise ArgumentError("bfloat16 needs the package ml_dtypes: pip install ml-dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def cast(x: Any, name: str) -> Any:
    """Convert a floating-point array; anything else, and an empty name, leaves `x` as it is."""
    dtype = getattr(x, "dtype", None)
    if not name or not isinstance(dtype, np.dtype) or dtype == dtype_of(name):
        return x
    is_float = dtype.kind == "f" or dtype.name == "bfloat16"
    return x.astype(dtype_of(name)) if is_float else x


@dataclass(frozen=True)
class LossScale:
    """Scale of the loss, so that small gradients do not vanish in float16.

    The scale falls when a gradient overflows, and the step is skipped on every rank; it rises after
    `interval` steps without. Where it cannot fall any more, an overflow is an error like one
    without a scale: below, gradients would vanish unseen. All values should be powers of two, so
    that scaling is exact.

    Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.

    Attributes:
        value: The scale.
        growth: Factor after `interval` good steps; 1 for a constant scale.
        backoff: Factor after an overflow.
        interval: Good steps before the scale grows.
        good_steps: Good steps since the last change.
        minimum: The scale does not fall below this, or below where it begins if that is lower.
    """

    value: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0
    minimum: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no scale.

        Raises:
            ArgumentError: Naming the setting and what is accepted.
        """
        # Kernels multiply by its inverse in float32.
        check_numbers(self, value="[1e-37, inf)", growth="[1, inf)", backoff="(0, 1]")
        check_numbers(self, interval="[1, inf)", good_steps="[0, inf)", minimum="[1e-37, inf)")
        object.__setattr__(self, "minimum", min(self.minimum, self.value))

    @property
    def exhausted(self) -> bool:
        """Whether it should fall after an overflow, and cannot."""
        return self.value * self.backoff < self.minimum

    def resumed(self, saved: Sequence[Any] | None) -> LossScale:
        """Return the scale to go on with, after a save of ``saved``: the value, and good steps.

        It is this one if none was saved, because losses were not scaled there, or if it is
        constant.
        """
        if saved is None or self.growth == self.backoff == 1:
            return self
        value, good_steps = saved
        return replace(self, value=value, good_steps=good_steps)

    def after(self, overflow: bool) -> LossScale:
        """Return the next scale, after ``overflow`` or none; one that cannot fall or grow stays."""
        if not overflow and self.good_steps + 1 < self.interval:
            return replace(self, good_steps=self.good_steps + 1)
        value = self.value * (self.backoff if overflow else self.growth)
        fits = not (overflow and self.exhausted) and value < math.inf
        return replace(self, value=value if fits else self.value, good_steps=0)

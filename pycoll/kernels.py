"""Fused passes over flat vectors: optimizer steps, unscaling, checks, exact sums of squares.

Each is one pass over memory, on the widest vector instructions of the CPU, and gives the bits of
the same formula in array operations; see ``csrc/optim.h``. Vectors are one-dimensional, contiguous
NumPy arrays; parameters and states are float32 or float64, gradients may be float16 or bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.types import DType

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BY_CHAR = {"e": int(DType.FLOAT16), "f": int(DType.FLOAT32), "d": int(DType.FLOAT64)}
_ADAMW, _SGD, _MOMENTUM, _NESTEROV = range(4)
EXACT_LIMBS: int = _C.EXACT_LIMBS
EXACT_BIAS: int = _C.EXACT_BIAS


def _look(x: Any, what: str, size: int | None = None) -> tuple[int, int]:
    """Return the address and the type number of a vector."""
    if x is None:
        return 0, int(DType.FLOAT16)
    kind = _BY_CHAR.get(x.dtype.char)
    if kind is None and x.dtype.name == "bfloat16":  # asking for a name takes microseconds
        kind = int(DType.BFLOAT16)
    if kind is None or not x.flags.c_contiguous:
        raise ArgumentError(
            f"{what} is {x.dtype}{list(x.shape)}; accepted are contiguous arrays of "
            f"{', '.join(_FLOATS)}"
        )
    if size is not None and x.size != size:
        raise ArgumentError(f"{what} has {x.size} elements, the parameter {size}")
    return x.__array_interface__["data"][0], kind


def _step(
    kind: int, param: Any, grad: Any, slots: tuple[Any, Any], copy: Any, scalars: list[float]
) -> None:
    target, state = _look(param, "param")
    given, grad_type = _look(grad, "grad", param.size)
    places = []
    for slot in slots:
        place, slot_type = _look(slot, "an optimizer state", param.size)
        if slot is not None and slot_type != state:
            raise ArgumentError(f"an optimizer state is {slot.dtype}, the parameter {param.dtype}")
        places.append(place)
    rounded, copy_type = _look(copy, "copy", param.size)
    _C.optim_step(
        kind, state, grad_type, copy_type, target, given, *places, rounded, param.size, scalars
    )


def adamw(
    param: Any,
    grad: Any,
    first: Any,
    second: Any,
    *,
    rate: float,
    keep: float,
    beta1: float,
    beta2: float,
    root: float,
    eps: float,
    scale: float = 1.0,
    copy: Any = None,
) -> None:
    """Step AdamW in place.

    With ``g = grad * scale``: ``param *= keep; first = first * beta1 + g * (1 - beta1); second =
    second * beta2 + g * g * (1 - beta2); param -= rate * (first / (sqrt(second) * root + eps))``.

    Args:
        param: Parameter, ``[count]``.
        grad: Gradient.
        first: First moment, of the type of `param`.
        second: Second moment, likewise.
        rate: Learning rate over ``1 - beta1 ** step``.
        keep: One minus learning rate times weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        root: One over the square root of ``1 - beta2 ** step``.
        eps: Added to the denominator.
        scale: Factor of the gradient.
        copy: Takes the new parameter, rounded to float16 or bfloat16.
    """
    scalars = [scale, keep, rate, beta1, beta2, root, eps, 0.0]
    _step(_ADAMW, param, grad, (first, second), copy, scalars)


def sgd(
    param: Any,
    grad: Any,
    momentum: Any,
    *,
    rate: float,
    beta: float,
    decay: float,
    nesterov: bool = False,
    scale: float = 1.0,
    copy: Any = None,
) -> None:
    """Step stochastic gradient descent in place.

    With ``g = grad * scale + param * decay``: ``momentum = momentum * beta + g; param -= rate *
    momentum``, or with Nesterov's momentum ``param -= rate * (g + momentum * beta)``.

    Args:
        param: Parameter, ``[count]``.
        grad: Gradient.
        momentum: Momentum, of the type of `param`; None: there is none.
        rate: Learning rate.
        beta: Decay of the momentum.
        decay: Weight decay, coupled.
        nesterov: Whether to look ahead.
        scale: Factor of the gradient.
        copy: Takes the new parameter, rounded to float16 or bfloat16.
    """
    kind = _SGD if momentum is None else _NESTEROV if nesterov else _MOMENTUM
    scalars = [scale, 1.0, rate, beta, 0.0, 1.0, 0.0, decay]
    _step(kind, param, grad, (momentum, None), copy, scalars)


def unscale(x: Any, out: Any, scale: float) -> int:
    """Store ``x * scale`` in `out`, which is float32; return how many results are not finite."""
    source, kind = _look(x, "x")
    target, wide = _look(out, "out", x.size)
    if wide != max(kind, int(DType.FLOAT32)):
        raise ArgumentError(f"out is {out.dtype}; accepted is float32, or float64 for float64")
    return _C.optim_unscale(kind, source, target, x.size, scale)


def count_nonfinite(x: Any) -> int:
    """Count infinities and NaNs."""
    source, kind = _look(x, "x")
    return _C.optim_nonfinite(kind, source, x.size)


def new_exact_sum() -> np.ndarray:
    """Make an accumulator for `add_squares`; accumulators of several ranks may be added."""
    return np.zeros(EXACT_LIMBS, np.int64)


def add_squares(x: Any, limbs: np.ndarray) -> int:
    """Add the square of each finite element to an accumulator, without any rounding.

    The result depends neither on the order of elements nor on how they are divided over calls or
    ranks. (Squares of float64 are rounded to float64 first.)

    Returns:
        How many elements are not finite.
    """
    source, kind = _look(x, "x")
    return _C.optim_add_squares(kind, source, x.size, limbs)


def exact_sum(limbs: np.ndarray) -> float:
    """Round what an accumulator holds to the nearest float."""
    total = 0
    for limb in reversed(limbs.tolist()):
        total = (total << 32) + limb
    try:
        return total / (1 << EXACT_BIAS)
    except OverflowError:
        return float("inf")

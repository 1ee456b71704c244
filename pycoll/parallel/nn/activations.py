"""Functions of single numbers as layers: of any shape, without parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pycoll.parallel.arrays import Array, namespace, pieces, widen
from pycoll.parallel.nn.layer import ParameterSpec

Params = Mapping[str, Array]


class _Pointwise:
    """What layers without parameters share: ``saved`` is what ``dy`` is multiplied with."""

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return nothing."""
        return {}

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``dy`` times the derivative."""
        return dy if saved is None else dy * saved

    def backward_weight(self, params: Params, saved: Any, dy: Array) -> dict[str, Array]:
        """Return nothing."""
        return {}


class GELU(_Pointwise):
    """The Gaussian error linear unit in its tanh form, of any shape.

    Source: Hendrycks and Gimpel, arXiv 1606.08415, section 2.
    """

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the derivative."""
        xp, vector = namespace(x), namespace(x).reshape(x, (-1,))
        y, slope = xp.empty_like(vector), xp.empty_like(vector)
        for piece in pieces(vector):
            y[piece], slope[piece] = _gelu(widen(vector[piece]))
        return xp.reshape(y, x.shape), xp.reshape(slope, x.shape)


def _gelu(x: Array) -> tuple[Array, Array]:
    """Return ``x (1 + tanh u) / 2`` with ``u = c (x + 0.044715 x^3)``, and its derivative."""
    c = math.sqrt(2 / math.pi)
    square = x * x
    t = square * (0.044715 * c)
    t += c
    t *= x
    t = namespace(x).tanh(t)
    square *= 3 * 0.044715 * c  # becomes x times the derivative of u
    square += c
    square *= x
    half = t + 1
    half *= 0.5
    t *= t  # becomes the derivative: half + (1 - tanh^2) / 2 * x u'
    t -= 1
    t *= -0.5
    t *= square
    t += half
    half *= x
    return half, t


class ReLU(_Pointwise):
    """The positive part, of any shape."""

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves where it is not zero."""
        positive = x > 0
        return namespace(x).where(positive, x, 0), positive

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``dy`` where the input was positive."""
        return namespace(dy).where(saved, dy, 0)


class Tanh(_Pointwise):
    """The hyperbolic tangent, of any shape."""

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the derivative."""
        y = namespace(x).tanh(x)
        return y, 1 - y * y

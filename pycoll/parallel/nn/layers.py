"""Layers of one rank: linear, embedding, normalisation, activations.

Each has an explicit forward and backward; see `pycoll.parallel.nn.layer.Layer`. Shapes: ``b``
samples, ``s`` positions, ``h`` features. `pycoll.parallel.tensor` splits these layers over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import (
    Array,
    Out,
    add_rows,
    as_indices,
    cast,
    matmul,
    namespace,
    pieces,
    put_all,
    row_dot,
    sum_rows,
    take_rows,
    widen,
)
from pycoll.parallel.nn.layer import (
    Grads,
    Layer,
    NoParameters,
    ParameterSpec,
    Params,
    normal_weight,
)
from pycoll.parallel.random import Key


def initial(layer: Layer) -> dict[str, np.ndarray]:
    """Return the initial values of a layer's parameters on this rank, as NumPy arrays."""
    specs = layer.parameters()
    return {
        name: np.zeros(spec.shape, spec.dtype)
        if spec.init is None
        else np.asarray(spec.init(spec.shape)).astype(spec.dtype)
        for name, spec in specs.items()
    }


def check_shape(array: Array, shape: tuple[int, ...], what: str) -> None:
    """Refuse an array of another shape."""
    if tuple(array.shape) != shape:
        raise ArgumentError(f"{what} has shape {tuple(array.shape)}, expected {shape}")


def flat(x: Array) -> Array:
    """Return an array as a matrix: all axes but the last become one."""
    return x if len(x.shape) == 2 else namespace(x).reshape(x, (-1, x.shape[-1]))


def affine(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return ``x @ weight.T + bias``: ``[..., in]`` -> ``[..., out]``."""
    y = matmul(flat(x), weight.T)
    if bias is not None:
        y += bias
    return namespace(y).reshape(y, (*x.shape[:-1], weight.shape[0]))


def affine_gradients(x: Array, dy: Array, bias: bool, out: Out = None) -> Grads:
    """Return the gradients of weight and bias of `affine`."""
    weight = {"weight": matmul(flat(dy).T, flat(x), (out or {}).get("weight"))}
    return weight | bias_gradient(dy, out) if bias else weight


def bias_gradient(dy: Array, out: Out = None) -> Grads:
    """Return the sum of the rows, as ``bias``."""
    return put_all({"bias": cast(sum_rows(widen(flat(dy))), dy.dtype)}, out)


@dataclass(frozen=True)
class Linear:
    """``y = x @ weight.T + bias``: ``[..., in_features]`` -> ``[..., out_features]``.

    Attributes:
        in_features: Features of the input.
        out_features: Features of the output.
        key: Names the layer in random numbers and errors: ``Key(seed).fold(name)``.
        bias: Whether there is a bias, which starts as zeros.
        std: Standard deviation of the initial weights; by default ``in_features ** -0.5``.
        dtype: Type of the parameters.
        tied_to: Full name of the parameter that is used as the weight.
    """

    in_features: int
    out_features: int
    key: Key
    bias: bool = True
    std: float | None = None
    dtype: str = "float32"
    tied_to: str | None = None

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[out, in]`` and bias ``[out]``."""
        shape = (self.out_features, self.in_features)
        specs = {"weight": normal_weight(self, shape, tied_to=self.tied_to)}
        if self.bias:
            specs["bias"] = ParameterSpec((self.out_features,), self.dtype, decay=False)
        return specs

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the input."""
        check_shape(
            params["weight"], (self.out_features, self.in_features), f"{self.key.name}.weight"
        )
        check_shape(x, (*x.shape[:-1], self.in_features), f"the input of {self.key.name}")
        return affine(x, params["weight"], params.get("bias")), x

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``dy @ weight``."""
        return affine(dy, params["weight"].T, None)

    def backward_weight(self, params: Params, saved: Any, dy: Array, out: Out = None) -> Grads:
        """Return ``dy.T @ x`` and the sum of the rows of ``dy``."""
        return affine_gradients(saved, dy, self.bias, out)


def check_indices(indices: Array, high: int, what: str) -> None:
    """Refuse indices outside of [0, high)."""
    bad = indices[(indices < 0) | (indices >= high)]
    if bad.shape[0]:
        raise ArgumentError(f"{what} holds {int(bad[0])}, expected integers of [0, {high})")


@dataclass(frozen=True)
class Embedding:
    """A row of a table for each token: ``[...]`` integers -> ``[..., features]``.

    Attributes:
        vocabulary: Number of tokens.
        features: Length of a row.
        key: Names the layer, as in `Linear`.
        std: Standard deviation of the initial table.
        dtype: Type of the table.
    """

    vocabulary: int
    features: int
    key: Key
    std: float = 0.02
    dtype: str = "float32"

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[vocabulary, features]``."""
        return {"weight": normal_weight(self, (self.vocabulary, self.features))}

    def forward(self, params: Params, x: Any) -> tuple[Array, Any]:
        """Return the rows; saves the tokens."""
        weight = params["weight"]
        tokens = as_indices(x, weight)
        check_shape(weight, (self.vocabulary, self.features), f"{self.key.name}.weight")
        check_indices(tokens, self.vocabulary, f"the input of {self.key.name}")
        return take_rows(weight, tokens), tokens

    def backward_input(self, params: Params, saved: Any, dy: Array) -> None:
        """Return None: token numbers have no gradient."""

    def backward_weight(self, params: Params, saved: Any, dy: Array, out: Out = None) -> Grads:
        """Return the sum of the gradients of each row."""
        place, tokens = (out or {}).get("weight"), namespace(saved).reshape(saved, (-1,))
        return {"weight": add_rows(self.vocabulary, tokens, flat(dy), place)}


@dataclass(frozen=True)
class LayerNorm:
    """Bring features to mean 0 and variance 1, then scale and shift them.

    16-bit input is computed in float32. Source: Ba, Kiros and Hinton, arXiv 1607.06450, section 3.

    Attributes:
        features: Length of the last axis.
        key: Names the layer, as in `Linear`.
        epsilon: Added to the variance.
        dtype: Type of the parameters.
        sequence_parallel: The input is this rank's part of the sequence, so that gradients of the
            parameters have to be added over the tensor-parallel ranks.
    """

    features: int
    key: Key
    epsilon: float = 1e-5
    dtype: str = "float32"
    sequence_parallel: bool = False

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight and bias ``[features]``, ones and zeros."""
        shape, sequence = (self.features,), self.sequence_parallel
        return {
            "weight": ParameterSpec(shape, self.dtype, np.ones, sequence=sequence, decay=False),
            "bias": ParameterSpec(shape, self.dtype, sequence=sequence, decay=False),
        }

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves the normalised input and 1 / deviation."""
        check_shape(params["weight"], (self.features,), f"{self.key.name}.weight")
        check_shape(x, (*x.shape[:-1], self.features), f"the input of {self.key.name}")
        xp, wide = namespace(x), widen(x)
        normal = wide - xp.mean(wide, axis=-1, keepdims=True)
        inverse = (row_dot(normal, normal) / self.features + self.epsilon) ** -0.5
        normal *= inverse
        y = normal * params["weight"]
        y += params["bias"]
        return cast(y, x.dtype), (normal, inverse)

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``(g - mean(g) - n mean(g n)) / deviation`` with ``g = dy weight``."""
        normal, inverse = saved
        dx = widen(dy) * params["weight"]
        projection = row_dot(dx, normal) / self.features
        dx -= namespace(dx).mean(dx, axis=-1, keepdims=True)
        dx -= normal * projection
        dx *= inverse
        return cast(dx, dy.dtype)

    def backward_weight(self, params: Params, saved: Any, dy: Array, out: Out = None) -> Grads:
        """Return the sums over rows of ``dy n`` and ``dy``."""
        normal, rows = flat(saved[0]), widen(flat(dy))
        found = {"weight": sum_rows(rows, normal), "bias": sum_rows(rows)}
        return put_all({name: cast(value, dy.dtype) for name, value in found.items()}, out)


class _Pointwise(NoParameters):
    """Base of functions of single numbers, of any shape; `saved` is the derivative."""

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return ``dy`` times the derivative."""
        return dy * saved


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

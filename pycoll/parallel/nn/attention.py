"""Causal self-attention between its two linear layers.

Source: Vaswani et al., arXiv 1706.03762, section 3.2. The backward pass takes the row sums of
``dp * p`` from the output (Dao et al., arXiv 2205.14135, section 3.1 and appendix B.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import (
    Array,
    cast,
    has_extras,
    matmul,
    move_to,
    namespace,
    row_dot,
    widen,
)
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.nn.layer import NoParameters, Params
from pycoll.parallel.nn.positional import draw_mask, masked, span
from pycoll.parallel.random import Cursor, Key


class _Saved(NamedTuple):
    """Input, weights ``[b, heads, s, s]``, which of them are kept, and the output."""

    x: Array
    weights: Array | None
    keep: Array | None
    y: Array


def transposed(x: Array) -> Array:
    """Return matrices with rows and columns exchanged, as a view."""
    return namespace(x).moveaxis(x, -1, -2)


def softmax_(x: Array) -> Array:
    """Replace each row by its softmax; return the array."""
    xp = namespace(x)
    x -= xp.max(x, axis=-1, keepdims=True)
    x = xp.exp(x, out=x) if has_extras(x) else xp.exp(x)
    x /= xp.sum(x, axis=-1, keepdims=True)
    return x


@dataclass(frozen=True)
class CausalAttention(NoParameters):
    """Attention of each position to itself and those before it, for the heads of this rank.

    ``[b, s, heads * 3 * width]`` -> ``[b, s, heads * width]``. Query, key and value of a head lie
    together, so that a split of the features over ranks is a split of the heads.

    Attributes:
        heads: Number of heads, over all ranks.
        width: Features of a head.
        key: Names the layer, as in `Linear`.
        comm: Ranks over which heads are split.
        drop: Probability with which a weight is dropped.
        cursor: Position of training, for dropout.
    """

    heads: int
    width: int
    key: Key
    comm: LayerComm | None = None
    drop: float = 0.0
    cursor: Cursor | None = None

    def __post_init__(self) -> None:
        """Refuse heads that ranks cannot share evenly."""
        if self.heads % self.ranks:
            raise ArgumentError(
                f"{self.key.name}: {self.heads} heads cannot be split over {self.ranks} "
                f"tensor-parallel ranks: {self.heads} is not divisible by {self.ranks}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks over which heads are split."""
        return 1 if self.comm is None else self.comm.world_size

    @property
    def _place(self) -> Any:
        """What knows this rank's number among them."""
        return self.comm

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves input, weights and output."""
        weights, keep = self._weights(x)
        v, xp = self._heads(x)[2], namespace(x)
        y = matmul(masked(weights, keep, self.drop), v)
        y = xp.reshape(xp.moveaxis(y, 1, 2), (*x.shape[:2], x.shape[2] // 3))
        return y, _Saved(x, weights, keep, y)

    def forget(self, saved: _Saved) -> _Saved:
        """Drop the weights, which are quadratic in the length; they are made again from the input.

        Source: Korthikanti et al., arXiv 2205.05198, section 5, selective recomputation.
        """
        return saved._replace(weights=None, keep=None)

    def _weights(self, x: Array) -> tuple[Array, Array | None]:
        """Return the weights ``[b, heads, s, s]``, and which of them are kept."""
        q, k, _ = self._heads(x)
        scores = matmul(widen(q) * self.width**-0.5, transposed(widen(k)))
        length = x.shape[1]
        scores += move_to(
            np.triu(np.full((length, length), -np.inf, np.float32), 1), scores, scores.dtype
        )
        weights = cast(softmax_(scores), x.dtype)
        part = span(self.heads // self.ranks, self._place)
        keep = draw_mask(weights, self.key, self.drop, self.cursor, self.heads, part)
        return weights, keep

    def backward_input(self, params: Params, saved: _Saved, dy: Array) -> Array:
        """Return the gradients of queries, keys and values, as they lie in the input."""
        x, weights, keep, y = saved
        if weights is None:
            weights, keep = self._weights(x)
        xp = namespace(x)
        q, k, v = self._heads(x)
        shape = (*x.shape[:2], self.heads // self.ranks, self.width)
        dout, out = (xp.moveaxis(xp.reshape(a, shape), 1, 2) for a in (dy, y))
        dx = xp.empty_like(x)
        dq, dk, dv = self._heads(dx)
        dv[...] = matmul(transposed(masked(weights, keep, self.drop)), dout)
        dscores = masked(matmul(dout, transposed(v)), keep, self.drop)
        dscores -= row_dot(dout, out)
        dscores *= weights
        dscores *= self.width**-0.5
        dq[...] = matmul(dscores, k)
        dk[...] = matmul(transposed(dscores), q)
        return dx

    def _heads(self, x: Array) -> tuple[Array, Array, Array]:
        """Return views of queries, keys and values: ``[b, heads, s, width]`` each."""
        own = self.heads // self.ranks
        if x.shape[-1] != own * 3 * self.width:
            raise ArgumentError(
                f"the input of {self.key.name} has {x.shape[-1]} features, expected "
                f"{own} heads x 3 x {self.width} on each of {self.ranks} tensor-parallel ranks"
            )
        xp = namespace(x)
        parts = xp.moveaxis(xp.reshape(x, (*x.shape[:2], own, 3, self.width)), 1, 2)
        return parts[:, :, :, 0, :], parts[:, :, :, 1, :], parts[:, :, :, 2, :]

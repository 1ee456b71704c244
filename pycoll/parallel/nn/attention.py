"""Causal self-attention between its two linear layers.

Source: Vaswani et al., arXiv 1706.03762, section 3.2. The backward pass takes the row sums of
``dp * p`` from the output (Dao et al., arXiv 2205.14135, section 3.1 and appendix B.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import (
    Array,
    as_array,
    cast,
    has_extras,
    matmul,
    move_to,
    namespace,
    row_dot,
    widen,
)
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.nn.positional import masked
from pycoll.parallel.random import Cursor, Key, keep_mask

if TYPE_CHECKING:
    from pycoll.comm import Communicator

Params = Mapping[str, Array]


class _Saved(NamedTuple):
    """Input, weights ``[b, heads, s, s]``, which of them were kept, and the output."""

    x: Array
    weights: Array
    keep: Array | None
    y: Array


def turned(x: Array) -> Array:
    """Return matrices with rows and columns exchanged: a view."""
    return namespace(x).moveaxis(x, -1, -2)


def softmax_(x: Array) -> Array:
    """Replace each row by its softmax; return the array."""
    xp = namespace(x)
    x -= xp.max(x, axis=-1, keepdims=True)
    x = xp.exp(x, out=x) if has_extras(x) else xp.exp(x)
    x /= xp.sum(x, axis=-1, keepdims=True)
    return x


@dataclass(frozen=True)
class CausalAttention:
    """Attention of each position to itself and those before it, for the heads of this rank.

    ``[b, s, heads * 3 * width]`` -> ``[b, s, heads * width]``. Query, key and value of a head lie
    together, so that a split of the features over ranks is a split of the heads.

    Attributes:
        heads: Number of heads, over all ranks.
        width: Features of a head.
        key: Name of the layer.
        comm: Ranks over which heads are split.
        drop: Probability with which a weight is dropped.
        cursor: Where training is, for dropout.
    """

    heads: int
    width: int
    key: Key
    comm: Communicator | None = None
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

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return nothing."""
        return {}

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves input, weights and output."""
        q, k, v = self._heads(x)
        scores = matmul(widen(q) * self.width**-0.5, turned(widen(k)))
        length = x.shape[1]
        scores += as_array(np.triu(np.full((length, length), -np.inf, np.float32), 1), scores)
        weights = cast(softmax_(scores), x.dtype)
        keep = self._keep(weights)
        xp, y = namespace(x), matmul(masked(weights, keep, self.drop), v)
        y = xp.reshape(xp.moveaxis(y, 1, 2), (*x.shape[:2], x.shape[2] // 3))
        return y, _Saved(x, weights, keep, y)

    def backward_input(self, params: Params, saved: _Saved, dy: Array) -> Array:
        """Return the gradients of queries, keys and values, as they lie in the input."""
        x, weights, keep, y = saved
        xp = namespace(x)
        q, k, v = self._heads(x)
        shape = (*x.shape[:2], self.heads // self.ranks, self.width)
        dout, out = (xp.moveaxis(xp.reshape(a, shape), 1, 2) for a in (dy, y))
        dx = xp.empty_like(x)
        dq, dk, dv = self._heads(dx)
        dv[...] = matmul(turned(masked(weights, keep, self.drop)), dout)
        dscores = masked(matmul(dout, turned(v)), keep, self.drop)
        dscores -= row_dot(dout, out)
        dscores *= weights
        dscores *= self.width**-0.5
        dq[...] = matmul(dscores, k)
        dk[...] = matmul(turned(dscores), q)
        return dx

    def backward_weight(self, params: Params, saved: _Saved, dy: Array) -> dict[str, Array]:
        """Return nothing."""
        return {}

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

    def _keep(self, weights: Array) -> Array | None:
        if not self.drop or self.cursor is None or not self.cursor.training:
            return None
        samples, own, length, _ = weights.shape
        first, rank = self.cursor.sample, 0 if self.comm is None else self.comm.rank
        part = [slice(first, first + samples), slice(rank * own, (rank + 1) * own)]
        shape = (first + samples, self.heads, length, length)
        keep = keep_mask(self.key.fold(self.cursor.step), self.drop, shape, part)
        return move_to(keep, weights)

"""Causal attention of a divided sequence for which ranks exchange positions for heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, namespace
from pycoll.parallel.context.split import Context
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.layer import NoParameters, Params
from pycoll.parallel.random import Cursor, Key


class _Place(NamedTuple):
    """Which of all parts of the heads a rank has."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class UlyssesAttention(NoParameters):
    """`CausalAttention` of a sequence of which each rank has a part, piece r of n.

    ``[b, s / n, heads * 3 * width]`` -> ``[b, s / n, heads * width]``. Between two all-to-alls each
    rank has all positions of an n-th of the heads.

    Cost: forward and backward each an all-to-all of the input and one of the output.

    Attributes are those of `CausalAttention`, and:
        context: How the sequence is divided: ``ulysses``, or ``ring``, which has the same pieces.
    """

    heads: int
    width: int
    key: Key
    comm: Communicator | None = None
    drop: float = 0.0
    cursor: Cursor | None = None
    context: Context | None = None

    def __post_init__(self) -> None:
        """Refuse heads that ranks cannot share evenly, and another kind of context."""
        if self.context is None or self.context.kind == "zigzag":
            raise ArgumentError(f"{self.key.name}: context={self.context!r}; expected ulysses")
        tensor = 1 if self.comm is None else self.comm.world_size
        if self.heads % (tensor * self._n):
            raise ArgumentError(
                f"{self.key.name}: {self.heads} heads cannot be split over {tensor} "
                f"tensor-parallel x {self._n} context-parallel ranks; use ring attention, or a "
                "smaller cp"
            )

    @property
    def _n(self) -> int:
        return self._group.world_size

    @property
    def _group(self) -> Any:
        return self.context.comm  # type: ignore[union-attr]

    @property
    def _inner(self) -> CausalAttention:
        rank, size = (0, 1) if self.comm is None else (self.comm.rank, self.comm.world_size)
        place: Any = _Place(rank * self._n + self._group.rank, size * self._n)
        return CausalAttention(self.heads, self.width, self.key, place, self.drop, self.cursor)

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves what the attention of this rank's heads does."""
        y, saved = self._inner.forward(params, self._to_heads(x))
        return self._to_positions(y), saved

    def forget(self, saved: Any) -> Any:
        """Drop the weights; see `CausalAttention.forget`."""
        return self._inner.forget(saved)

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return the gradients of queries, keys and values, as they lie in the input."""
        return self._to_positions(self._inner.backward_input(params, saved, self._to_heads(dy)))

    def _to_heads(self, x: Array) -> Array:
        """Give each rank its features of all positions."""
        n, (b, s, f) = self._n, x.shape
        if n == 1:
            return x
        if f % n:
            raise ArgumentError(
                f"the input of {self.key.name} has {f} features, not {n} equal parts"
            )
        xp = namespace(x)
        parts = xp.moveaxis(xp.reshape(x, (b, s, n, f // n)), 2, 0)
        found = self._group.all_to_all(xp.reshape(parts, (n, b, s, f // n)))
        return xp.reshape(xp.moveaxis(found, 0, 1), (b, n * s, f // n))

    def _to_positions(self, y: Array) -> Array:
        """Give each rank its positions of all features."""
        n, (b, s, f) = self._n, y.shape
        if n == 1:
            return y
        xp = namespace(y)
        parts = xp.moveaxis(xp.reshape(y, (b, n, s // n, f)), 1, 0)
        found = self._group.all_to_all(xp.reshape(parts, (n, b, s // n, f)))
        return xp.reshape(xp.moveaxis(found, 0, 2), (b, s // n, n * f))

"""Causal attention of a divided sequence for which ranks exchange positions for heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pycoll.errors import ArgumentError
from pycoll.parallel.arrays import Array, namespace
from pycoll.parallel.context.split import Context
from pycoll.parallel.nn.attention import CausalAttention
from pycoll.parallel.nn.layer import Params


class _Place(NamedTuple):
    """Which of all parts of the heads a rank has."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class UlyssesAttention(CausalAttention):
    """`CausalAttention` of a sequence of which each rank has a part, piece r of n.

    ``[b, s / n, heads * 3 * width]`` -> ``[b, s / n, heads * width]``. Between two all-to-alls each
    rank has all positions of an n-th of the heads.

    Cost: forward and backward each an all-to-all of the input and one of the output.

    Attributes are those of `CausalAttention`, and:
        context: How the sequence is divided: ``ulysses``, or ``ring``, which has the same pieces.
    """

    context: Context | None = None

    def __post_init__(self) -> None:
        """Refuse heads that ranks cannot share evenly, and another kind of context."""
        if self.context is None or self.context.kind == "zigzag":
            raise ArgumentError(f"{self.key.name}: context={self.context!r}; expected ulysses")
        if self.heads % self.ranks:
            raise ArgumentError(
                f"{self.key.name}: {self.heads} heads cannot be split over {super().ranks} "
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
    def ranks(self) -> int:
        """Number of ranks over which heads are split between the all-to-alls."""
        return super().ranks * self._n

    @property
    def _place(self) -> _Place:
        tensor = 0 if self.comm is None else self.comm.rank
        return _Place(tensor * self._n + self._group.rank, self.ranks)

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output; saves what the attention of this rank's heads does."""
        y, saved = super().forward(params, self._to_heads(x))
        return self._to_positions(y), saved

    def backward_input(self, params: Params, saved: Any, dy: Array) -> Array:
        """Return the gradients of queries, keys and values, as they lie in the input."""
        return self._to_positions(super().backward_input(params, saved, self._to_heads(dy)))

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

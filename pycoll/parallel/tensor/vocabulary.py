"""The two ends of a GPT, with the vocabulary split over ranks.

Source: Shoeybi et al., arXiv 1909.08053, section 3 (the embedding, and the loss that does not
gather logits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pycoll.parallel.arrays import (
    Array,
    Out,
    add_rows,
    as_indices,
    cast,
    namespace,
    take_rows,
    widen,
)
from pycoll.parallel.nn.layer import ParameterSpec
from pycoll.parallel.nn.layers import check_indices, flat
from pycoll.parallel.nn.losses import Saved, gradient, prepare
from pycoll.parallel.random import Key, normal_init
from pycoll.parallel.tensor.regions import (
    REDUCE,
    REDUCE_SCATTER_SEQUENCE,
    Region,
    check_part,
    own_part,
    share,
)

if TYPE_CHECKING:
    from pycoll.comm import Communicator

Params = Mapping[str, Array]


def columns(tokens: Array, own: int, rank: int) -> tuple[Array, Array]:
    """Return which tokens are among the ``own`` ones of a rank, and their place there (else 0)."""
    local = tokens - rank * own
    here = (local >= 0) & (local < own)
    return here, namespace(tokens).where(here, local, 0)


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """A row of a table for each token, each rank having the rows of some tokens.

    ``[b, s]`` integers, the same on every rank, -> ``[b, s, features]``; with `sequence_parallel`
    ``[b, s / n, features]``.

    Cost: forward an all-reduce (or reduce-scatter) of the output, backward none (or an all-gather).

    Attributes:
        vocabulary: Number of tokens, over all ranks.
        features: Length of a row.
        key: Name of the layer.
        comm: The tensor-parallel ranks.
        sequence_parallel: The output is this rank's part of the sequence.
        std: Standard deviation of the initial table.
        dtype: Type of the table.
    """

    vocabulary: int
    features: int
    key: Key
    comm: Communicator
    sequence_parallel: bool = False
    std: float = 0.02
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse a vocabulary that ranks cannot share evenly."""
        share(self.vocabulary, self.comm, f"axis 0 of {self.key.name}.weight")

    @property
    def _shape(self) -> tuple[int, int]:
        return self.vocabulary // self.comm.world_size, self.features

    @property
    def _region(self) -> Region:
        return REDUCE_SCATTER_SEQUENCE if self.sequence_parallel else REDUCE

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight ``[vocabulary / n, features]``."""
        here = 0, self.comm.rank, self.comm.world_size
        init = normal_init(self.key.fold("weight"), self.std, *here)
        return {"weight": ParameterSpec(self._shape, self.dtype, init, **own_part(0, self.comm))}

    def forward(self, params: Params, x: Any) -> tuple[Array, Any]:
        """Return the rows; saves which tokens are this rank's, and where."""
        weight = params["weight"]
        check_part(weight, self._shape, self.comm, f"{self.key.name}.weight")
        tokens = as_indices(x, weight)
        check_indices(tokens, self.vocabulary, f"the input of {self.key.name}")
        here, rows = columns(tokens, self._shape[0], self.comm.rank)
        y = namespace(weight).where(here[..., None], take_rows(weight, rows), 0)
        return self._region.forward(y, self.comm), (here, rows)

    def backward_input(self, params: Params, saved: Any, dy: Array) -> None:
        """Return None: token numbers have no gradient."""

    def backward_weight(
        self, params: Params, saved: Any, dy: Array, out: Out = None
    ) -> dict[str, Array]:
        """Return the sum of the gradients of each of this rank's rows."""
        here, rows = saved
        xp = namespace(dy)
        mine = xp.reshape(here, (-1,))
        whole = flat(self._region.backward(dy, self.comm))
        place = (out or {}).get("weight")
        return {
            "weight": add_rows(self._shape[0], xp.reshape(rows, (-1,))[mine], whole[mine, :], place)
        }


@dataclass(frozen=True)
class VocabParallelCrossEntropy:
    """`CrossEntropy` of logits ``[b, s, vocabulary / n]``: each rank has some of the columns.

    Cost: forward three all-reduces of one number for each target (maximum, sum of exponentials,
    logit of the target); backward none.

    Attributes:
        comm: The tensor-parallel ranks.
        ignore_index: Target of rows that do not count.
    """

    comm: Communicator
    ignore_index: int = -100

    def forward(self, logits: Array, targets: Any) -> tuple[float, int, Saved]:
        """Return the sum, the number of rows that count, and what the backward pass needs.

        Args:
            logits: This rank's columns, ``[..., vocabulary / n]``.
            targets: Integers ``[...]`` of [0, vocabulary), or `ignore_index`; the same on all
                ranks.
        """
        own = logits.shape[-1]
        targets, valid = prepare(logits, targets, self.ignore_index, own * self.comm.world_size)
        rows = widen(flat(logits))
        xp = namespace(rows)
        top = self._all_reduce(xp.max(rows, axis=-1), "max")
        odds = xp.exp(rows - top[:, None])
        total = self._all_reduce(xp.sum(odds, axis=-1), "sum")
        here, column = columns(targets, own, self.comm.rank)
        target = xp.where(here, rows[xp.arange(rows.shape[0]), column], 0)
        target = self._all_reduce(target, "sum")
        losses = xp.log(total) + (top - target)
        odds /= total[:, None]
        every = bool(xp.all(valid))
        loss = float(xp.sum(cast(losses if every else losses[valid], xp.float64)))
        shape, ignored = tuple(logits.shape), None if every else ~valid
        return (
            loss,
            int(xp.count_nonzero(valid)),
            Saved(odds, column, here, ignored, shape, logits.dtype),
        )

    def backward(self, saved: Saved, scale: float) -> Array:
        """Return the gradient of ``scale * sum`` with respect to this rank's logits."""
        return gradient(saved, scale)

    def _all_reduce(self, x: Array, op: str) -> Array:
        return x if self.comm.world_size == 1 else self.comm.all_reduce(x, op)

"""Softmax cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.arrays import Array, as_indices, cast, has_extras, namespace, widen
from pycoll.parallel.channels import LayerComm
from pycoll.parallel.nn.layers import check_indices, flat


class Saved(NamedTuple):
    """What the backward pass of a cross-entropy needs."""

    odds: Array  # probabilities ``[n, vocabulary]``, or this rank's columns of them
    column: Array  # of the target in each row; 0 where `here` is False
    here: Array  # whether the row's target is among the columns
    ignored: Array | None  # rows that have no target; None: all have one
    shape: tuple[int, ...]  # of the logits
    dtype: Any  # of the logits


def sum_and_count(found: Any) -> tuple[Any, Any]:
    """Return what a function of a program gave as loss: a sum, and the number of samples.

    Raises:
        ArgumentError: If it gave something else, such as the sum or the mean alone.
    """
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ArgumentError(
            f"the loss returned {kind_of(found)}; expected two things, the sum of the losses of "
            "the micro-batch and the number of its samples, such as (loss, len(targets))"
        )
    return found[0], found[1]


def prepare(logits: Array, targets: Any, ignore_index: int, vocabulary: int) -> tuple[Array, ...]:
    """Check the arguments of a loss; return targets ``[n]``, and which of them count.

    Raises:
        ArgumentError: If there are not as many targets as rows, or one is not in the vocabulary.
    """
    targets = as_indices(targets, logits)
    if tuple(targets.shape) != tuple(logits.shape[:-1]):
        raise ArgumentError(
            f"targets have shape {tuple(targets.shape)}, "
            f"but logits have shape {tuple(logits.shape)}"
        )
    targets = namespace(targets).reshape(targets, (-1,))
    valid = targets != ignore_index
    check_indices(targets[valid], vocabulary, "targets")
    return targets, valid


def columns(tokens: Array, own: int, rank: int) -> tuple[Array, Array]:
    """Return which tokens are among the `own` ones of a rank, and their index there (else 0)."""
    local = tokens - rank * own
    here = (local >= 0) & (local < own)
    return here, namespace(tokens).where(here, local, 0)


class SoftmaxCrossEntropy:
    """What cross-entropies share, whether ranks have all columns of the logits or some of them."""

    ignore_index: int
    _comm: LayerComm | None = None  # the ranks with the other columns

    def forward(self, logits: Array, targets: Any) -> tuple[float, int, Saved]:
        """Return the sum, the number of rows that count, and what the backward pass needs.

        Args:
            logits: ``[..., vocabulary]``; of a split vocabulary, this rank's columns.
            targets: Integers ``[...]`` of [0, vocabulary), or `ignore_index`; the same on all
                ranks of a split vocabulary.
        """
        own, comm = logits.shape[-1], self._comm
        rank, n = (0, 1) if comm is None else (comm.rank, comm.world_size)
        targets, valid = prepare(logits, targets, self.ignore_index, own * n)
        rows = widen(flat(logits))
        xp = namespace(rows)
        top = self._all_reduce(xp.max(rows, axis=-1), "max")
        odds = xp.exp(rows - top[:, None])
        total = self._all_reduce(xp.sum(odds, axis=-1), "sum")
        here, column = columns(targets, own, rank)
        target = xp.where(here, rows[xp.arange(rows.shape[0]), column], 0)
        losses = xp.log(total) + (top - self._all_reduce(target, "sum"))
        odds /= total[:, None]
        every = bool(xp.all(valid))
        loss = float(xp.sum(cast(losses if every else losses[valid], xp.float64)))
        shape, ignored = tuple(logits.shape), None if every else ~valid
        saved = Saved(odds, column, here, ignored, shape, logits.dtype)
        return loss, int(xp.count_nonzero(valid)), saved

    def backward(self, saved: Saved, scale: float) -> Array:
        """Return the gradient of ``scale * sum`` with respect to the logits.

        It is ``scale * (probabilities - one at the target)``, zero in rows that are ignored.
        """
        xp = namespace(saved.odds)
        dlogits = saved.odds * scale
        if has_extras(dlogits):
            rows = xp.nonzero(saved.here)[0]
            dlogits[rows, saved.column[rows]] -= scale
        else:
            numbers = xp.arange(dlogits.shape[1], dtype=saved.column.dtype, device=dlogits.device)
            target = (numbers[None, :] == saved.column[:, None]) & saved.here[:, None]
            dlogits -= scale * xp.astype(target, dlogits.dtype)
        if saved.ignored is not None:
            dlogits[saved.ignored] = 0
        return xp.reshape(cast(dlogits, saved.dtype), saved.shape)

    def _all_reduce(self, x: Array, op: str) -> Array:
        comm = self._comm
        return x if comm is None or comm.world_size == 1 else comm.all_reduce(x, op)


@dataclass(frozen=True)
class CrossEntropy(SoftmaxCrossEntropy):
    """The sum of ``-log softmax(logits)[target]``, in nats; logits ``[..., vocabulary]``.

    Attributes:
        ignore_index: Target of rows that do not count.
    """

    ignore_index: int = -100

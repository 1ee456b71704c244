"""Top-k sparsification: send the largest elements now, the others when they have grown."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.ledger import Channel, Pending
from pycoll.parallel.hooks.hook import Hook, Kept, Then
from pycoll.parallel.state.layout import Layout


class TopK(Hook):
    """Each rank sends the elements of its bucket that are largest in magnitude.

    What is not sent is kept and added to the next gradient (error feedback), so that nothing is
    lost, only late. Sums are formed in rank order, alike on every rank. A rank receives
    ``world_size * k`` pairs of number and value: ``(n - 1) * k * (4 + itemsize)`` bytes sent.
    Stages 1 and 2 send the same: every rank forms the sum and keeps its block. Of a bucket with
    parameters that are split over ``tp`` and others that are not, both have a ``k`` of their own.

    Source: Lin et al., "Deep gradient compression", ICLR 2018, section 3; Stich et al., "Sparsified
    SGD with memory", NeurIPS 2018, algorithm 1.
    """

    stages = (0, 1, 2)
    devices = ("cpu",)

    def __init__(self, ratio: float) -> None:
        """Choose the part of the elements to send, in (0, 1]."""
        if not 0 < ratio <= 1:
            raise ArgumentError(f"ratio={ratio!r}; accepted are numbers above 0 and at most 1")
        self.ratio = ratio
        self._errors = Kept()

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        whole = channel.ledger.track(self._errors.unsent(self, key, data) + data, "hook")
        where = self._largest(np.abs(whole[: layout.count]), layout)
        k = where.size
        row = np.concatenate([where, whole[where].view(np.int32)])
        out = channel.empty(row.size * channel.world_size, np.int32, "hook")
        pending = channel.all_gather(row, out, "gradient")

        def finish(rows: Any) -> Any:
            whole[where] = 0
            self._errors.put(key, whole)
            return self._add(rows.reshape(channel.world_size, row.size), k, data)

        return Then(pending, finish)

    reduce_scatter = Hook.take_block

    def _largest(self, sizes: Any, layout: Layout) -> Any:
        """Return the numbers of the elements to send, in ascending order.

        Elements that all ranks of ``tp`` have compete among themselves: each of these ranks has to
        choose the same ones, whatever is in its part of the others.
        """
        split = [entry.parameter.spec.tensor_axis is not None for entry in layout.entries]
        if all(split) or not any(split):
            chosen = self._most(sizes)
        else:
            apart = np.repeat(split, [entry.parameter.size for entry in layout.entries])
            parts = (np.flatnonzero(~apart), np.flatnonzero(apart))
            chosen = np.concatenate([part[self._most(sizes[part])] for part in parts])
        return np.sort(chosen).astype(np.int32)

    def _most(self, sizes: Any) -> Any:
        """Return the numbers of the largest ones, in any order."""
        left = sizes.size - math.ceil(self.ratio * sizes.size)
        return np.argpartition(sizes, left)[left:]

    @staticmethod
    def _add(rows: Any, k: int, data: Any) -> Any:
        data[...] = 0
        for row in rows:
            data[row[:k]] += row[k:].view(data.dtype)
        return data

    def begin(self, factor: float) -> None:
        """Give what is unsent the scale of the next gradients; see `Hook.begin`."""
        self._errors.drop()
        self._errors.rescale(factor)

    def settle(self) -> None:
        """Keep what was not sent; see `Hook.settle`."""
        self._errors.settle()

    def state(self) -> dict[str, Any]:
        """Return what has not been sent yet, by bucket."""
        return {f"unsent {key}": error.copy() for key, error in self._errors.arrays.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Take what `state` gave on this rank.

        Raises:
            ArgumentError: If it is that of another hook.
        """
        if other := [key for key in state if not key.startswith("unsent ")]:
            raise ArgumentError(f"{', '.join(other)}: not a state of TopK")
        self._errors.arrays = {k.removeprefix("unsent "): np.array(x) for k, x in state.items()}

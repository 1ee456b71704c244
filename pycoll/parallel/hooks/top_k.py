"""Top-k sparsification: send the largest elements now, the others when they have grown."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Pending
from pycoll.parallel.hooks.error_feedback import ErrorFeedback
from pycoll.parallel.state.layout import Layout


class TopK(ErrorFeedback):
    """Each rank sends the elements of its bucket that are largest in magnitude.

    The rest is added to the next gradient (error feedback), so that nothing is lost, only late.
    Every rank forms the sum, in rank order. A rank receives ``world_size * k`` pairs of index and
    value: ``(n - 1) * k * (4 + itemsize)`` bytes sent, in stages 1 and 2 as well. In a bucket with
    parameters that are split over ``tp`` and others that are not, both have a ``k`` of their own.

    Source: Lin et al., "Deep gradient compression", ICLR 2018, section 3; Stich et al., "Sparsified
    SGD with memory", NeurIPS 2018, algorithm 1.
    """

    def __init__(self, ratio: float) -> None:
        """Choose the fraction of the elements to send, in (0, 1]."""
        if not 0 < ratio <= 1:
            raise ArgumentError(f"ratio={ratio!r}; accepted are numbers above 0 and at most 1")
        super().__init__("unsent")
        self.ratio = ratio

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        whole = self._add_unsent(key, data, channel)
        where = self._largest(np.abs(whole[: layout.count]), layout)
        k = where.size
        row = np.concatenate([where, whole[where].view(np.int32)])
        out = channel.empty(row.size * channel.world_size, np.int32, "hook")
        pending = channel.all_gather(row, out, "gradient")

        def finish(rows: Any) -> Any:
            whole[where] = 0
            self._put("unsent", key, whole)
            data[...] = 0
            for found in rows.reshape(channel.world_size, row.size):
                data[found[:k]] += found[k:].view(data.dtype)
            return data

        return pending.then(finish)

    def _largest(self, sizes: Any, layout: Layout) -> Any:
        """Return the indices of the elements to send, in ascending order."""
        # Elements that all ranks of tp have compete among themselves: these ranks have to choose
        # the same ones, whatever their parts of split parameters hold.
        split = [entry.parameter.spec.tensor_axis is not None for entry in layout.entries]
        if all(split) or not any(split):
            chosen = self._most(sizes)
        else:
            apart = np.repeat(split, [entry.parameter.size for entry in layout.entries])
            parts = (np.flatnonzero(~apart), np.flatnonzero(apart))
            chosen = np.concatenate([part[self._most(sizes[part])] for part in parts])
        return np.sort(chosen).astype(np.int32)

    def _most(self, sizes: Any) -> Any:
        """Return the indices of the largest, in any order."""
        left = sizes.size - math.ceil(self.ratio * sizes.size)
        return np.argpartition(sizes, left)[left:]

"""The order of samples for a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator

import torch.utils.data

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.sampler import Sampler


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """The micro-batches of one rank until the end of the epoch, from the position of a `Sampler`.

    ::

        sampler = Sampler(len(data), batch=64, micro_batch=8)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, rank, ranks), num_workers=4)
        for batch in loader:
            ...

    A loader reads ahead, so this moves no position: add ``sampler.batch`` to ``sampler.position``
    when a step is done. A new iteration begins there, and what a loader had read ahead is read
    again, not lost.
    """

    def __init__(self, sampler: Sampler, rank: int = 0, ranks: int = 1) -> None:
        """Take the order of `sampler`; see `Sampler.part` for the ranks."""
        if not isinstance(sampler, Sampler):
            raise ArgumentError(
                f"the sampler is {kind_of(sampler)}; expected a Sampler of pycoll.parallel"
            )
        self._sampler, self._place = sampler, (rank, ranks)
        sampler.part(0, *self._place)  # refuses ranks that there are not

    def _positions(self) -> range:
        sampler = self._sampler
        return range(sampler.position, (sampler.epoch + 1) * sampler.size, sampler.batch)

    def __iter__(self) -> Iterator[list[int]]:
        for position in self._positions():
            for micro_batch in self._sampler.part(position, *self._place):
                yield micro_batch.tolist()

    def __len__(self) -> int:
        """Return the number of micro-batches until the end of the epoch."""
        one = len(self._sampler.part(self._sampler.position, *self._place))
        return one * len(self._positions())

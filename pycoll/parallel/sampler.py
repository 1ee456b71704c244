"""The order of samples: a function of a seed and of how many samples came before, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycoll.errors import ArgumentError, kind_of
from pycoll.parallel.random import Key, words
from pycoll.parallel.settings import check_number, describe


class Sampler:
    """Deals the samples of a data set out to ranks, in micro-batches.

    ::

        sampler = Sampler(len(x), batch=64, micro_batch=8, seed=3)
        while sampler.epoch < 10:
            mine = sampler.next(engine.groups.data.rank, engine.groups.data.world_size)
            engine.step([(x[i], y[i]) for i in mine])

    Samples are numbered through all epochs: number g is at place ``g % size`` of the order of epoch
    ``g // size``. A batch takes the next `batch` numbers, also across the end of an epoch, so that
    no sample is left out or seen twice. It is cut into micro-batches of `micro_batch` numbers, and
    each rank gets neighbouring ones. So a step uses the same micro-batches on any number of ranks,
    and which runs then agree to the bit is in docs/parallel.md.

    Attributes:
        size: Samples of the data set.
        batch: Samples of a step, of all ranks together.
        micro_batch: Samples of a micro-batch.
        position: Number of the first sample of the next step. A run may go on with another batch
            size.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        *,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Begin with sample 0.

        Args:
            size: Samples of the data set.
            batch: Samples of a step, of all ranks together.
            micro_batch: Samples of a micro-batch, which divides `batch`; None: one for each rank,
                which then depends on the number of ranks.
            seed: Any integer.
            shuffle: False: every epoch has the order of the data set.

        Raises:
            ArgumentError: For numbers that cannot be used.
        """
        for name, value in (("size", size), ("batch", batch), ("micro_batch", micro_batch or 1)):
            check_number(name, value, "[1, inf)", whole=True)
        if batch % (micro_batch or 1):
            raise ArgumentError(f"micro_batch={micro_batch} does not divide batch={batch}")
        self.size: int = int(size)
        self.batch: int = int(batch)
        self.micro_batch = micro_batch
        self.position: int = 0
        self._key, self._shuffle = Key(seed, ("samples",)), shuffle
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0 on."""
        return self.position // self.size

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of ``epoch``: a permutation of ``range(size)``, kept until the next."""
        if self._order[0] != epoch:
            numbers = np.arange(self.size)
            if self._shuffle:
                numbers = np.argsort(words(self._key.fold(epoch), (self.size,)), kind="stable")
            self._order = (epoch, numbers)
        return self._order[1]

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the places in the data set of the samples with numbers ``start`` to ``stop``."""
        found = [np.empty(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.size)
            last = min(self.size, first + stop - start)
            found.append(self.order(epoch)[first:last])
            start += last - first
        return np.concatenate(found)

    def part(self, position: int, rank: int = 0, ranks: int = 1) -> list[np.ndarray]:
        """Return the micro-batches of a rank, as places in the data set, of the step at a position.

        Args:
            position: Number of the first sample of the step.
            rank: Rank among those with different samples; in a mesh those of ``replica`` and
                ``dp``, ``engine.groups.data``.
            ranks: Number of these ranks.

        Raises:
            ArgumentError: If there is no such rank.
        """
        check_number("position", position, "[0, inf)", whole=True)
        check_number("ranks", ranks, "[1, inf)", whole=True)
        check_number("rank", rank, f"[0, {ranks})", whole=True)
        grain = self.micro_batch or 1
        count = self.batch // grain
        lo, hi = (position + grain * (count * r // ranks) for r in (rank, rank + 1))
        step = self.micro_batch or max(1, hi - lo)
        return [self.samples(first, first + step) for first in range(lo, hi, step)]

    def next(self, rank: int = 0, ranks: int = 1) -> list[np.ndarray]:
        """Return the micro-batches of a rank in the next step, and go on; see `part`."""
        found = self.part(self.position, rank, ranks)
        self.position += self.batch
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the order: numbers and texts, the same on every rank."""
        return {
            "position": self.position,
            "size": self.size,
            "seed": describe(self._key.seed),
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` gave ``saved``, on any number of ranks.

        Raises:
            ArgumentError: If it is of another order: size, seed or `shuffle` differ.
        """
        if not isinstance(saved, Mapping):
            raise ArgumentError(f"the saved order is {kind_of(saved)}; expected that of state_dict")
        own = self.state_dict()
        for name in ("size", "seed", "shuffle"):
            if saved.get(name) != own[name]:
                raise ArgumentError(
                    f"the saved order has {name} {saved.get(name)!r}, this one {own[name]!r}; "
                    "samples would be seen twice and others never"
                )
        check_number("position", saved.get("position"), "[0, inf)", whole=True)
        self.position = int(saved["position"])

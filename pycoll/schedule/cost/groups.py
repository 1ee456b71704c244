"""Many groups of ranks on one network, all in the same collective at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pycoll.schedule.cost.fabric import Fabric


@dataclass(frozen=True)
class Groups(Fabric):
    """One group of n ranks, as it is among others that do the same.

    Attributes:
        whole: The network of all ranks; the group's ranks are ``stride`` apart in it, from 0 on.
        stride: That distance. The other groups are this one, moved, so that they fill the network.
    """

    whole: Fabric = field(default_factory=lambda: Fabric(1))
    stride: int = 1

    @classmethod
    def of(cls, whole: Fabric, size: int, stride: int) -> Groups:
        """Divide a network into groups."""
        shared = {name: getattr(whole, name) for name in ("bw", "latency", "hop", "gap", "fold")}
        return cls(size, **shared, whole=whole, stride=stride)

    @property
    def near(self) -> int:
        """The ranks of this group that are close to each other."""
        return max(1, self.whole.near // self.stride)

    @property
    def bases(self) -> np.ndarray:
        """First rank of each group; ranks at the end that make no whole group are in none."""
        rank = np.arange(self.whole.n - (self.n - 1) * self.stride)
        return rank[rank // self.stride % self.n == 0]

    def links(self) -> dict[str, np.ndarray]:
        """Those of the whole network."""
        return self.whole.links()

    def load(
        self, into: np.ndarray, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray | float
    ) -> None:
        """Add the bytes of all groups."""
        for base in self.bases:
            self.whole.load(into, base + src * self.stride, base + dst * self.stride, nbytes)

    def slowest(self, busy: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return what the worst of the groups finds."""
        found = [self.whole.slowest(busy, *ends) for ends in self._ends(src, dst)]
        return np.maximum.reduce(found)

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return what the worst of the groups finds."""
        found = [self.whole.delay(*ends) + 0.0 * src for ends in self._ends(src, dst)]
        return np.maximum.reduce(found)

    def _ends(self, src: np.ndarray, dst: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(b + src * self.stride, b + dst * self.stride) for b in self.bases]

    def leaving(self, busy: np.ndarray) -> np.ndarray:
        """The busiest port that a rank of this number has in any group."""
        ports = self.whole.leaving(busy)
        place = np.arange(self.n) * self.stride
        return np.maximum.reduce([ports[base + place] for base in self.bases])

"""A torus: ranks on a grid whose axes are rings; messages go along one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.schedule.cost.fabric import Fabric


class _Leg(NamedTuple):
    """The way of messages along one axis in one direction."""

    first: int  # number of the first link of this axis and direction
    # ring, start, hops: ``[messages]`` which ring, from which place on it, how far
    ring: np.ndarray
    start: np.ndarray
    hops: np.ndarray
    shape: tuple[int, int]  # number of rings, and their length


@dataclass(frozen=True)
class Torus(Fabric):
    """A rank for each point of a grid, with links to its two neighbours along each axis.

    Messages take the shorter way around; of two equally long ones, every other rank takes either.
    Links ``+0``, ``-0``, ``+1``, ... leave a rank along that axis; they are numbered ring by ring.

    Attributes:
        dims: Length of each axis; the last varies fastest with the rank.
    """

    dims: tuple[int, ...] = ()

    kind: ClassVar[str] = "torus"
    about: ClassVar[str] = "a grid whose axes are rings"

    def __post_init__(self) -> None:
        """Refuse a grid of another size; ArgumentError."""
        super().__post_init__()
        if math.prod(self.dims) != self.n or not self.dims or min(self.dims) < 1:
            grid = "x".join(map(str, self.dims)) or "?"
            raise ArgumentError(f"a torus of {grid} does not hold {self.n} ranks")

    def links(self) -> dict[str, np.ndarray]:
        """Two links of each rank along each axis."""
        axes = range(len(self.dims))
        return {f"{way}{axis}": np.full(self.n, self.bw) for axis in axes for way in "+-"}

    def _legs(self, src: np.ndarray, dst: np.ndarray) -> Iterator[_Leg]:
        src, dst = np.broadcast_arrays(src, dst)
        here, there = (list(np.unravel_index(r, self.dims)) for r in (src, dst))
        for axis, size in enumerate(self.dims):
            ahead = (there[axis] - here[axis]) % size
            back = (2 * ahead > size) | ((2 * ahead == size) & (sum(here) % 2 == 1))
            others = [here[other] for other in range(len(self.dims)) if other != axis]
            rest = [self.dims[other] for other in range(len(self.dims)) if other != axis]
            ring = np.ravel_multi_index(others, rest) if rest else np.zeros_like(src)
            shape = self.n // size, size
            yield _Leg(self.first[f"+{axis}"], ring, here[axis], np.where(back, 0, ahead), shape)
            mirrored = size - 1 - here[axis]  # so that going back is going on
            hops = np.where(back, size - ahead, 0)
            yield _Leg(self.first[f"-{axis}"], ring, mirrored, hops, shape)
            here[axis] = there[axis]

    def load(
        self, into: np.ndarray, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray | float
    ) -> None:
        """Add the bytes of messages to all links on their way."""
        for leg in self._legs(src, dst):
            rings, size = leg.shape
            row = leg.ring * (2 * size + 1) + leg.start
            weights = np.broadcast_to(nbytes, row.shape) * (leg.hops > 0)
            length = rings * (2 * size + 1)
            change = np.bincount(row, weights, length) - np.bincount(
                row + leg.hops, weights, length
            )
            passing = np.cumsum(change.reshape(rings, -1), axis=1)
            around = passing[:, :size] + passing[:, size : 2 * size]
            into[leg.first : leg.first + self.n] += np.maximum(0, around.ravel())

    def slowest(self, busy: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return the busiest link on the way: the larger of two runs of 2^j that cover each leg."""
        most = np.zeros(np.broadcast_shapes(np.shape(src), np.shape(dst)))
        for leg in self._legs(src, dst):
            rings, size = leg.shape
            runs = busy[leg.first : leg.first + self.n].reshape(rings, size)
            length = 1
            while True:  # runs[ring, place] is the busiest of so many links from there on
                now = np.flatnonzero((leg.hops >= length) & (leg.hops < 2 * length))
                ring, start, hops = leg.ring[now], leg.start[now], leg.hops[now]
                ends = np.maximum(runs[ring, start], runs[ring, (start + hops - length) % size])
                most[now] = np.maximum(most[now], ends)
                if 2 * length > size // 2:
                    break
                runs = np.maximum(runs, np.roll(runs, -length, axis=1))
                length *= 2
        return most

    def delay(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Every rank on the way is a switch."""
        hops = sum(leg.hops for leg in self._legs(src, dst))
        return self.latency + self.hop * np.maximum(0, hops - 1)

    def leaving(self, busy: np.ndarray) -> np.ndarray:
        """The busiest of the links that leave a rank."""
        grid = np.arange(self.n).reshape(self.dims)
        most = np.zeros(self.n)
        for axis, size in enumerate(self.dims):
            rank = np.moveaxis(grid, axis, -1).reshape(-1, size)
            for way, order in (("+", rank), ("-", rank[:, ::-1])):
                link = self.first[f"{way}{axis}"]
                most[order.ravel()] = np.maximum(most[order.ravel()], busy[link : link + self.n])
        return most

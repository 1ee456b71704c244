"""What survives the death of a rank: states as they were after a step, and a neighbour's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pycoll.parallel.arrays import as_numpy
from pycoll.parallel.engine.data_parallel import DataParallel

_TAG = 1 << 20


@dataclass
class Version:
    """The state after a step, as far as one rank has it.

    Attributes:
        epoch: Number of the engine whose ranks share it, among all of the training.
        step: Number of steps taken in the training.
        rank: This rank's number there.
        ranks: How many there were.
        counters: Steps of the optimizer, loss scale, good steps.
        shards: Vectors by shard, bucket and kind. Of an engine that replicates all, shard 0 is all.
    """

    epoch: int
    step: int
    rank: int
    ranks: int
    counters: tuple[float, float, float]
    shards: dict[int, dict[tuple[int, str], Any]] = field(default_factory=dict)


def counters(engine: DataParallel) -> tuple[float, float, float]:
    """Return what a state has besides vectors."""
    scale = engine.loss_scale
    return float(engine.steps), float(scale.value), float(scale.good_steps)


def own_vectors(engine: DataParallel) -> dict[tuple[int, str], Any]:
    """Return the parameters and states that this rank updates, as views, by bucket and kind."""
    found = {}
    for b, bucket in enumerate(engine.buckets):
        for kind, vector in bucket.states.items():
            if vector is None:  # the parameters themselves, without a master copy
                vector = bucket.parameter.data
                if vector.shape[0] > bucket.size:
                    vector = vector[bucket.first : bucket.first + bucket.size]
            found[b, kind] = vector
    return found


class Copies:
    """The versions that this rank could bring to others.

    With replicated states (``zero=0``) the engine itself is the newest version. With sharded ones
    this rank keeps the last two of its shard, and with `redundancy` those of the rank before it:
    ranks that have finished a step, and ranks that a death has kept from it, have one in common.
    """

    def __init__(self, redundancy: int) -> None:
        self._redundancy = redundancy
        self.versions: list[Version] = []

    def take(self, engine: DataParallel, epoch: int, step: int) -> None:
        """Keep the state after a step; with redundancy a collective."""
        world = engine.groups.world
        version = Version(epoch, step, world.rank, world.world_size, counters(engine))
        own = own_vectors(engine)
        if engine.options.zero == 0:
            version.shards[0] = own
            self.versions = [version]
            return
        reuse = self._oldest(epoch)
        version.shards[world.rank] = _copied(own, reuse.get(world.rank))
        if self._redundancy and world.world_size > 1:
            left = (world.rank - 1) % world.world_size
            version.shards[left] = self._exchange(engine, own, reuse.get(left))
        self.versions.append(version)

    def _oldest(self, epoch: int) -> dict[int, dict[tuple[int, str], Any]]:
        """Drop a version that nobody needs any more: its memory is for the next one."""
        mine = [version for version in self.versions if version.epoch == epoch]
        if len(mine) < 2:
            return {}
        self.versions.remove(mine[0])
        return mine[0].shards

    def _exchange(
        self, engine: DataParallel, own: dict[tuple[int, str], Any], reuse: Any
    ) -> dict[tuple[int, str], Any]:
        """Give the own shard to the next rank, and get that of the rank before."""
        comm = engine.groups.world.comm
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        got = {}
        for tag, (key, vector) in enumerate(own.items(), _TAG):
            sent = as_numpy(vector)
            got[key] = np.empty_like(sent) if reuse is None else reuse[key]
            if comm.rank % 2 == 0:
                comm.send(sent, after, tag)
            comm.recv(got[key], before, tag)
            if comm.rank % 2:
                comm.send(sent, after, tag)
            engine.ledger.wire["redundancy", "world"] += sent.nbytes
        return got

    def keep_only(self, epoch: int) -> None:
        """Drop what earlier communicators had, once all ranks of this one have it."""
        self.versions = [version for version in self.versions if version.epoch == epoch]


def _copied(own: dict[tuple[int, str], Any], reuse: Any) -> dict[tuple[int, str], Any]:
    if reuse is None:
        return {key: as_numpy(vector).copy() for key, vector in own.items()}
    for key, vector in own.items():
        reuse[key][...] = as_numpy(vector)
    return reuse

"""Bringing a state to a new engine: all ranks choose a version, and those that have it send it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pycoll.parallel.arrays import as_numpy
from pycoll.parallel.elastic.copies import Version
from pycoll.parallel.engine.data_parallel import DataParallel
from pycoll.parallel.state.layout import ALIGN

_MOST = 4  # versions of one rank
_FIELDS = 5  # of a version in the table: epoch, step, rank, ranks, shards


class Chosen:
    """A version that the ranks have together.

    Attributes:
        epoch: Number of the engine whose state it is.
        step: Steps of the training that it has.
        providers: The rank that has each shard, or all if there is one; -1: none that is left has.
        left: The ranks of its communicator that are gone.
        came: The ranks of this communicator that have nothing.
    """

    def __init__(self, epoch: int, step: int, shards: int) -> None:
        self.epoch = epoch
        self.step = step
        self.providers: list[int] = [-1] * shards
        self.left: set[int] = set()
        self.came: set[int] = set()

    @property
    def whole(self) -> bool:
        """Whether every shard is there."""
        return -1 not in self.providers


def choose(engine: DataParallel, versions: list[Version]) -> tuple[Chosen | None, int]:
    """Find the newest version that the ranks have together; a collective.

    Returns:
        The version; if no rank has any, None. One that is not `whole` is the newest of which there
        is a part, where the ranks have none together. And its epoch, -1 if there is none.
    """
    row = np.full((_MOST, _FIELDS), -1, np.int64)
    held = np.full((_MOST, 2), -1, np.int64)
    for i, version in enumerate(versions[-_MOST:]):
        parts = version.ranks if engine.options.zero else 1
        row[i] = (version.epoch, version.step, version.rank, version.ranks, parts)
        shards = list(version.shards)
        held[i, : len(shards)] = shards
    world = engine.groups.world
    table = world.gather_rows(np.concatenate([row.reshape(-1), held.reshape(-1)]), "rejoin")
    found: dict[tuple[int, int], Chosen] = {}
    left: dict[int, set[int]] = {}
    came = set()
    for rank, line in enumerate(table):
        rows = line[: row.size].reshape(row.shape)
        shards = line[row.size :].reshape(held.shape)
        if rows[0, 0] < 0:
            came.add(rank)
        for (epoch, step, old, ranks, parts), have in zip(
            rows.tolist(), shards.tolist(), strict=True
        ):
            if epoch < 0:
                continue
            left.setdefault(epoch, set(range(ranks))).discard(old)
            chosen = found.setdefault((epoch, step), Chosen(epoch, step, parts))
            for shard in have:
                if shard >= 0 and chosen.providers[shard] < 0:
                    chosen.providers[shard] = rank
    every = [chosen for _, chosen in sorted(found.items())]
    if not every:
        return None, -1
    chosen = next((version for version in reversed(every) if version.whole), every[-1])
    chosen.left, chosen.came = left[chosen.epoch], came
    return chosen, max(left)


def _part(
    values: dict[str, dict[str, Any]], kind: str, name: str, start: int, stop: int
) -> np.ndarray:
    """Return a part of a full vector, as `Bucket.fill` asks for it."""
    return values[kind][name][start:stop]


def bring(engine: DataParallel, chosen: Chosen, versions: list[Version]) -> int:
    """Give every rank its part of a version; a collective. Returns the bytes of the state.

    Bucket by bucket: each shard is broadcast by a rank that has it, and each rank keeps what the
    new placement gives it. No file is read.
    """
    mine = [v for v in versions if (v.epoch, v.step) == (chosen.epoch, chosen.step)]
    comm, moved = engine.groups.world.comm, 0
    numbers = np.array(mine[0].counters if mine else (0.0, 0.0, 0.0))
    comm.broadcast(numbers, root=chosen.providers[0])
    for b, bucket in enumerate(engine.buckets):
        count, grain = bucket.layout.count, len(chosen.providers) * ALIGN
        size = -(-count // grain) * ALIGN  # of an old shard
        if len(chosen.providers) == 1:
            size = count
        values: dict[str, dict[str, Any]] = {}
        for kind, vector in bucket.states.items():
            like = bucket.parameter.data if vector is None else vector
            full = np.empty(count, as_numpy(like[:0]).dtype)
            for shard, provider in enumerate(chosen.providers):
                part = full[shard * size : (shard + 1) * size]
                if part.size:
                    if comm.rank == provider:
                        part[...] = as_numpy(mine[0].shards[shard][b, kind])[: part.size]
                    comm.broadcast(part, root=provider)
            moved += full.nbytes
            values[kind] = {e.parameter.name: full[e.start : e.stop] for e in bucket.layout.entries}
        bucket.fill(partial(_part, values))
    engine.steps = int(numbers[0])
    scale = replace(engine.loss_scale, value=float(numbers[1]), good_steps=int(numbers[2]))
    engine.loss_scale, engine._hook_scale = scale, scale.value
    return moved

"""Placed vectors: where the elements are, and the four ways to change that.

Data parallelism and ZeRO differ in one thing: how parameters, gradients and optimizer states are
placed over the ranks. A `Preset` names the three placements; everything else follows from them.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
SC 2020, section 5; sharding inside a group and replicating across groups: Zhang et al., "MiCS:
near-linear scaling for training gigantic model on public cloud", VLDB 2022, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Pending


class Placement(Enum):
    """How a vector lies over the ranks of a group."""

    REPLICATE = "replicate"
    """Every rank has all of it."""
    PARTIAL = "partial"
    """Every rank has a term of all of it; the vector is the sum."""
    SHARD = "shard"
    """Rank r has block r of it."""


@dataclass(frozen=True)
class Preset:
    """Placements of parameters, gradients (once a micro-batch is done) and optimizer states."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD
PRESETS = (Preset(R, P, R), Preset(R, P, S), Preset(R, S, S), Preset(S, S, S))
"""By ZeRO stage; stage 0 is plain data parallelism."""


@dataclass
class Placed:
    """A flat vector over a group of ranks.

    Attributes:
        data: What this rank has: ``[count]``, or a shard ``[count / world_size]``.
        placement: How `data` relates to the vector.
        channel: The ranks.
        kind: What its memory counts as in the ledger.
    """

    data: Any
    placement: Placement
    channel: Channel
    kind: str

    def to(
        self, target: Placement, purpose: str, order: str | None = None, out: Any = None
    ) -> Pending:
        """Start a transition; `Pending.wait` gives the new data.

        ======================  ====================  =========================
        transition              collective            bytes sent per rank
        ======================  ====================  =========================
        shard -> replicate      all-gather            (n - 1) / n of the vector
        partial -> shard        reduce-scatter        (n - 1) / n
        partial -> replicate    all-reduce, in place  2 (n - 1) / n
        replicate -> shard      none: a view          0
        ======================  ====================  =========================

        Args:
            target: The placement to reach.
            purpose: What the bytes count as in the ledger.
            order: Order of a reduction; see `pycoll.Communicator.all_reduce`.
            out: Memory for the result of an all-gather or a reduce-scatter.

        Raises:
            ArgumentError: If there is no such transition.
        """
        channel, step = self.channel, (self.placement, target)
        if step == (S, R):
            return channel.all_gather(self.data, out, purpose)
        if step == (P, S):
            return channel.reduce_scatter(self.data, out, purpose, order)
        if step == (P, R):
            return channel.all_reduce(self.data, purpose, order)
        if step == (R, S):
            view = own_block(self.data, channel.rank, channel.world_size)
            return Pending(None, view, channel.ledger, purpose)
        raise ArgumentError(
            f"no transition from {self.placement.value} to {target.value}; there are shard to "
            "replicate, partial to shard, partial to replicate, and replicate to shard"
        )


def own_block(data: Any, rank: int, n: int) -> Any:
    """Return block `rank` of `n` equal blocks, as a view."""
    size = data.shape[0] // n
    return data[rank * size : (rank + 1) * size]

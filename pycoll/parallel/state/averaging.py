"""Periodic averaging: replicas take steps of their own, and average what they have now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel
from pycoll.parallel.optim import SGD, Optimizer, UpdateArgs, is_optimizer
from pycoll.parallel.state.bucket import Bucket


@dataclass(frozen=True)
class Average:
    """Local SGD: parameters become their mean over the replicas.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019, algorithm 1;
    momentum averaged, too: Yu, Jin and Yang, "On the linear speedup analysis of communication
    efficient momentum SGD", ICML 2019, algorithm 1.

    Attributes:
        states: Whether states of the optimizer, such as momentum, become their mean as well, which
            sends as much again for each.
    """

    states: bool = False
    meets = True  # afterwards all replicas are alike

    def prepare(self, bucket: Bucket) -> None:
        """Make what it keeps for ``bucket``."""

    def begin(self, bucket: Bucket) -> None:
        """Note where the steps of ``bucket`` between two averages begin."""

    def apply(self, buckets: Sequence[Bucket], replicas: Channel, order: str, step: int) -> None:
        """Average ``buckets`` in ``order``; a collective of ``replicas``, the ``step``-th."""
        pending = []
        for bucket in buckets:
            vectors = [bucket.updated, *(bucket.slots.values() if self.states else ())]
            pending += [(x, replicas.all_reduce(x, "average", order)) for x in vectors]
        for x, work in pending:
            work.wait()
            x *= x.dtype.type(1 / replicas.world_size)

    together = apply


@dataclass(frozen=True)
class Gossip(Average):
    """Parameters become the mean of a replica's own and those of its neighbours on a ring.

    A replica waits for its neighbours only. The weights are doubly stochastic, so the mean over all
    replicas stays what it is; they come closer to it, and are never together by this alone.

    Source: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS
    2017, algorithm 1, with the ring of section 5.
    """

    meets = False

    def apply(self, buckets: Sequence[Bucket], replicas: Channel, order: str, step: int) -> None:
        """Average with the neighbours along the replicas; see `Average.apply`."""
        pending = []
        for bucket in buckets:
            vectors = [bucket.updated, *(bucket.slots.values() if self.states else ())]
            pending += [(x, x.copy()) for x in vectors]
        found = [(x, replicas.neighbours(own, "average")) for x, own in pending]
        for x, theirs in found:
            for work, y in theirs:
                work.wait()
                x += y
            x *= x.dtype.type(1 / (1 + len(theirs)))


@dataclass(frozen=True)
class DiLoCo:
    """An optimizer takes a step with the mean of what replicas have changed, as with a gradient.

    States of the inner optimizer stay with each replica.

    Source: Douillard et al., arXiv 2311.08105, algorithm 1.

    Attributes:
        outer: The optimizer of these steps; that of the paper by default.
    """

    outer: Optimizer = field(default_factory=lambda: SGD(0.7, momentum=0.9, nesterov=True))
    meets = True

    def __post_init__(self) -> None:
        """Refuse what is no optimizer, such as its rate."""
        if not is_optimizer(self.outer):
            raise ArgumentError(
                f"outer={self.outer!r}; expected an optimizer, such as SGD(0.7, momentum=0.9)"
            )

    def prepare(self, bucket: Bucket) -> None:
        """Make what it keeps for ``bucket``."""
        bucket.outer = {f"outer_{name}": np.zeros_like(bucket.updated) for name in self.outer.slots}

    def begin(self, bucket: Bucket) -> None:
        """Note where the steps of ``bucket`` between two averages begin."""
        bucket.anchor = bucket.updated.copy()

    def apply(self, buckets: Sequence[Bucket], replicas: Channel, order: str, step: int) -> None:
        """Take a step from where the replicas were last together; see `Average.apply`."""
        pending = []
        for bucket in buckets:
            x = bucket.updated
            np.subtract(bucket.anchor, x, out=x)
            pending.append((bucket, x, replicas.all_reduce(x, "average", order)))
        for bucket, x, work in pending:
            work.wait()
            slots = {name: bucket.outer[f"outer_{name}"] for name in self.outer.slots}
            mean = 1 / replicas.world_size
            args = UpdateArgs(step, self.outer.lr, bucket.anchor, x, slots, mean, decay=False)
            self.outer.update(args)
            x[...] = bucket.anchor

    together = apply

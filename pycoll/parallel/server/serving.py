"""The server's end: adds or applies what workers push, and answers with parameters.

Sources: sharded servers and pushes that are applied one by one: Dean et al., "Large scale
distributed deep networks", NIPS 2012, section 4.1; bounded staleness: Ho et al., "More effective
distributed ML via a stale synchronous parallel parameter server", NIPS 2013, section 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pycoll.comm import Communicator
from pycoll.errors import MismatchError
from pycoll.parallel.compare import name_ranks
from pycoll.parallel.server.worker import HEAD
from pycoll.parallel.state.bucket import Bucket
from pycoll.parallel.state.gradients import Sums, plan_sum

PUSH, PULL = "push", "pull"


@dataclass
class Served:
    """What servers have done, over all rounds.

    Attributes:
        updates: Updates of a bucket.
        staleness: How many pushes of a bucket (values) were applied after so many others (keys)
            since their worker had got its parameters.
        lead: How many pushes of a bucket came from a worker that was so many steps (keys) ahead of
            the slowest one.
        lost: Workers that died, and were gone on without.
    """

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    lead: Counter[int] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)

    def add(self, other: Served) -> None:
        """Count what ``other`` has done, too."""
        self.updates += other.updates
        self.staleness += other.staleness
        self.lead += other.lead


class Service:
    """Serves the workers of one round, from their first push until each has said that it ends.

    Attributes:
        versions: Number of updates of each bucket of this server.
        served: What was done so far.
        order: What happened here, one after the other: ``(PUSH or PULL, worker, bucket)``. None: it
            is not recorded.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        order: str,
        lr: float,
        most_lead: float | None,
        record: bool,
    ) -> None:
        """Serve buckets, by number.

        Args:
            buckets: With parameters and states of the optimizer.
            order: Order of sums over workers.
            lr: Rate of pushes that give none.
            most_lead: Steps by which a worker may be ahead of the slowest, which may be infinity;
                None: pushes of all workers are added up before they are applied.
            record: Whether to note the order.
        """
        self._buckets, self._order, self._lr = buckets, order, lr
        self._most_lead = most_lead
        self.versions: dict[int, int] = dict.fromkeys(buckets, 0)
        self.served: Served = Served()
        self.order: list[tuple[str, int, int]] | None = [] if record else None
        self._copies: dict[tuple[int, int], np.ndarray] = {}

    def run(self, comm: Communicator, workers: Mapping[int, int]) -> None:
        """Send all parameters to the workers, then serve until every worker has ended.

        Args:
            comm: Reaches the workers.
            workers: Steps that each worker has taken, by rank.
        """
        self._comm, self._live = comm, set(workers)
        self._heads: dict[int, tuple[float, float]] = {}
        self._clocks = {(w, b): steps for w, steps in workers.items() for b in self._buckets}
        self._seen: dict[tuple[int, int], int] = {}
        self._waiting = [(w, b) for b in self._buckets for w in workers]
        if self._most_lead is None:
            for w, b in self._waiting:
                self._answer(w, b)
            self._serve_sums()
        else:  # after a death a worker may be too far ahead
            self._release(self._buckets)
            self._serve_each()
        for w in workers:
            comm.send(np.zeros(1), w, HEAD)

    def _take_head(self, w: int) -> None:
        """Receive what a worker says before it pushes, or at its end."""
        head = np.empty(2)
        self._comm.recv(head, w, HEAD)
        if head[0] < 0:
            self._live.discard(w)
            self._heads.pop(w, None)
        else:
            self._heads[w] = float(head[0]), self._rate(float(head[1]))

    def _rate(self, lr: float) -> float:
        return self._lr if math.isnan(lr) else lr

    def _serve_sums(self) -> None:
        """Add up what all workers push in a step, in the order of workers, then apply it."""
        while True:
            for w in sorted(self._live):
                self._take_head(w)
            workers = sorted(self._live)
            if not workers:
                return
            rates = [self._heads[w][1] for w in workers]
            if len(set(rates)) > 1:
                each = "; ".join(
                    f"{name_ranks([w for w in workers if self._heads[w][1] == lr])}: {lr:g}"
                    for lr in dict.fromkeys(rates)
                )
                raise MismatchError(f"workers push with different learning rates: {each}")
            samples = sum(self._heads[w][0] for w in workers)
            for b, bucket in self._buckets.items():
                bucket.gradients.result = self._sum(b, bucket, workers)
                for w in workers:
                    self._note_push(w, b)
                self._update(b, rates[0], samples)
                for w in workers:
                    self._answer(w, b)

    def _sum(self, b: int, bucket: Bucket, workers: Sequence[int]) -> np.ndarray:
        like = bucket.gradients.kept
        sums, row = Sums(like, lambda: np.empty_like(like)), np.empty_like(like)
        for term, w in zip(plan_sum(len(workers), self._order), workers, strict=True):
            target = sums.begin(term)
            self._comm.recv(row if term.add else target, w, b + 1)
            if term.add:
                target += row
            sums.end(term)
        return sums.take()

    def _serve_each(self) -> None:
        """Apply each push when it comes."""
        while self._live:
            found = self._comm.probe()
            w, b = found.src, found.tag - 1
            if found.tag == HEAD:
                self._take_head(w)
                self._release(() if w in self._live else self._buckets)
                continue
            bucket = self._buckets[b]
            self._comm.recv(bucket.gradients.kept, w, found.tag)
            bucket.gradients.result = bucket.gradients.kept
            self._note_push(w, b)
            samples, lr = self._heads[w]
            self._update(b, lr, samples)
            self._waiting.append((w, b))
            self._release([b])

    def _update(self, b: int, lr: float, samples: float) -> None:
        self.versions[b] += 1
        self.served.updates += 1
        self._buckets[b].update(self.versions[b], lr, 1.0 / samples)

    def _note_push(self, w: int, b: int) -> None:
        self.served.staleness[self.versions[b] - self._seen[w, b]] += 1
        self.served.lead[self._clocks[w, b] - self._slowest(b)] += 1
        self._clocks[w, b] += 1
        if self.order is not None:
            self.order.append((PUSH, w, b))

    def _slowest(self, b: int) -> int:
        return min(self._clocks[w, b] for w in self._live)

    def _release(self, buckets: Collection[int]) -> None:
        """Answer who may go on: who is not too far ahead of the slowest."""
        assert self._most_lead is not None
        still = []
        for w, b in self._waiting:
            far = self._live and self._clocks[w, b] - self._slowest(b) > self._most_lead
            if b not in buckets or far:
                still.append((w, b))
            else:
                self._answer(w, b)
        self._waiting = still

    def _answer(self, w: int, b: int) -> None:
        """Send the parameters of a bucket to a worker, which gets them when it likes.

        The next update of a sum comes after all of them have. Else each worker has a copy.
        """
        data = self._buckets[b].parameter.data
        if self._most_lead is not None:
            if (w, b) not in self._copies:
                self._copies[w, b] = np.empty_like(data)
            self._copies[w, b][...] = data
            data = self._copies[w, b]
        self._seen[w, b] = self.versions[b]
        if self.order is not None:
            self.order.append((PULL, w, b))
        self._comm.isend(data, w, b + 1)

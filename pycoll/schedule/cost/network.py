"""What a schedule costs where ranks send messages: within hosts, and over the links between them.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994, with one
pair of constants for the messages of a host and one for its link, which all its ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pycoll.schedule.cost.cost import active, peers_of
from pycoll.schedule.ir import Fold, Schedule


@dataclass(frozen=True)
class Network:
    """Hosts that exchange messages; the defaults are rounded figures of a cluster on Ethernet."""

    alpha: float = 1.0e-6  # seconds that a message within a host takes, however small
    beta: float = 1.0e-10  # seconds per byte of it
    far_alpha: float = 2.0e-5  # seconds that a message between hosts takes, however small
    far_beta: float = 8.0e-10  # seconds per byte on the link of a host, in each direction
    # seconds for each further message that a rank sends or receives in a round
    sigma: float = 3.0e-7
    gamma: float = 5.0e-12  # seconds per byte that a rank folds into another
    call: float = 1.0e-6  # seconds of a call that moves nothing
    # number of ranks of each host, in rank order; empty: a host for each
    ranks_per_host: tuple[int, ...] = ()

    def hosts(self, n: int) -> np.ndarray:
        """Return the number of the host of each of n ranks, ``[n]``."""
        if sum(self.ranks_per_host) != n:
            return np.arange(n)
        return np.repeat(np.arange(len(self.ranks_per_host)), self.ranks_per_host)

    def predict(self, schedule: Schedule, nbytes: int, direct: bool = False) -> float:
        """Predict the time of a call, in seconds.

        A round lasts as long as its busiest rank sends, receives and folds, or as long as the
        busiest link of a host is busy in its busier direction.

        Args:
            schedule: What runs.
            nbytes: Size of the full vector.
            direct: Without meaning here: no rank reaches another rank's memory.
        """
        del direct
        hosts = self.hosts(schedule.n)
        size = nbytes / max(1, schedule.chunks)
        ranks = schedule.all_ranks()
        rounds = schedule.rounds(ranks)
        return self.call + sum(self._round(ranks, folds, hosts, size) for folds in rounds)

    def _round(
        self, everyone: np.ndarray, folds: list[Fold], hosts: np.ndarray, size: float
    ) -> float:
        n = len(everyone)
        near, far, messages = (np.zeros((2, n)) for _ in range(3))  # sent, received
        links = np.zeros((2, int(hosts.max()) + 1))
        reduced = np.zeros(n)
        for f in folds:
            count = active(f, n)
            reduced += (len(f.srcs) - 1) * count * size
            for stores, peer in peers_of(f, everyone):
                moved = np.where(peer != everyone, count, 0)
                outside = moved * (hosts[peer] != hosts)
                for way, ranks in enumerate((everyone, peer) if stores else (peer, everyone)):
                    near[way] += np.bincount(ranks, moved - outside, n)
                    far[way] += np.bincount(ranks, outside, n)
                    links[way] += np.bincount(hosts[ranks], outside, len(links[way]))
                    messages[way] += np.bincount(ranks, moved > 0, n)
        alpha = np.where(far > 0, self.far_alpha, np.where(near > 0, self.alpha, 0.0))
        more = self.sigma * np.maximum(messages - 1, 0)
        ranks = (alpha + more + self.beta * near * size).max(axis=0) + self.gamma * reduced
        link = self.far_beta * size * links.max()
        return float(max(ranks.max(), link + (self.far_alpha if link else 0.0)))

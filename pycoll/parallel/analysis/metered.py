"""A communicator whose calls are counted in a ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pycoll.parallel.analysis.ledger import VOLUME, Ledger

if TYPE_CHECKING:
    from pycoll.comm import Communicator


class Metered:
    """The collectives that layers use, with bytes, calls and waiting counted.

    Attributes:
        comm: The communicator; its calls are not counted.
        rank: Rank in the communicator.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        ledger: Ledger,
        group: str = "tp",
        purpose: str = "activation",
        order: str | None = None,
    ) -> None:
        """Put a meter on a communicator.

        Args:
            comm: The communicator; stays the caller's.
            ledger: Where its calls are counted.
            group: Name of the ranks in the ledger.
            purpose: What the bytes are for.
            order: Order of reductions; see `pycoll.Communicator.all_reduce`.
        """
        self.rank, self.world_size = comm.rank, comm.world_size
        self.comm, self._ledger, self._order = comm, ledger, order
        self._group, self._purpose = group, purpose

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """Combine the arrays of all ranks; see `pycoll.Communicator`."""
        return self._call("all_reduce", x, x.nbytes, op=op, order=self._order)

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Combine all arrays; rank r gets block r."""
        return self._call("reduce_scatter", x, x.nbytes, op=op, order=self._order)

    def all_gather(self, x: Any) -> Any:
        """Concatenate all arrays along the first axis."""
        return self._call("all_gather", x, x.nbytes * self.world_size)

    def _call(self, collective: str, x: Any, nbytes: int, **options: Any) -> Any:
        if self.world_size == 1:
            return getattr(self.comm, collective)(x, **options)
        self._ledger.wire[self._purpose, self._group] += VOLUME[collective](self.world_size, nbytes)
        self._ledger.calls[self._purpose, self._group, collective] += 1
        start = time.perf_counter()
        result = getattr(self.comm, collective)(x, **options)
        self._ledger.waits[self._purpose] += time.perf_counter() - start
        return result

"""The byte ledger: what memory holds and what crosses the wire, counted where it happens."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from pycoll.comm import Communicator, Work

VOLUME: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, nbytes: -(-2 * (n - 1) * nbytes // n),
    "reduce_scatter": lambda n, nbytes: -(-(n - 1) * nbytes // n),
    "all_gather": lambda n, nbytes: -(-(n - 1) * nbytes // n),
}
"""Bytes that each of n ranks sends for a full vector of nbytes, bandwidth-optimal algorithm.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009, section 3;
ring and halving-doubling both reach it.
"""


class Ledger:
    """Counts bytes of one rank.

    Attributes:
        live: Bytes held now, by kind (``parameter``, ``gradient``, ``optimizer``, ...). An array
            counts until it has really been collected.
        peak: Largest sum of `live` since the last `reset_peak`.
        wire: Bytes sent, by ``(purpose, group)``; purposes are ``gradient``, ``parameter``,
            ``norm``, ``count``, ...
        calls: Number of collectives, by ``(purpose, group, collective)``.
        waits: Seconds spent waiting for communication, by purpose.
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.peak_by_kind: Counter[str] = Counter()
        self.wire: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self._tracked: set[int] = set()

    def track(self, array: Any, kind: str) -> Any:
        """Count an array under a kind until it is collected, once; return it."""
        if id(array) in self._tracked:  # a layer may give the same one in every step
            return array
        self._tracked.add(id(array))
        self.live[kind] += array.nbytes
        weakref.finalize(array, self._forget, id(array), kind, array.nbytes).atexit = False
        if self.total > self.peak:
            self.peak, self.peak_by_kind = self.total, Counter(self.live)
        return array

    def _forget(self, array: int, kind: str, nbytes: int) -> None:
        self._tracked.discard(array)
        self.live[kind] -= nbytes

    @property
    def total(self) -> int:
        """Bytes held now, all kinds."""
        return sum(self.live.values())

    def reset_peak(self) -> None:
        """Start to look for a new peak from what is held now."""
        self.peak, self.peak_by_kind = self.total, Counter(self.live)

    def sent_since(self, before: Counter[tuple[str, str]]) -> dict[str, int]:
        """Return the bytes sent since `wire` was `before`, by purpose."""
        sent: Counter[str] = Counter()
        for (purpose, _), nbytes in (self.wire - before).items():
            sent[purpose] += nbytes
        return dict(sent)

    def wire_bytes(self, purpose: str | None = None, group: str | None = None) -> int:
        """Bytes sent so far for a purpose (None: for all) in a group (None: in all)."""
        return sum(
            nbytes
            for (p, g), nbytes in self.wire.items()
            if purpose in (None, p) and group in (None, g)
        )


class Pending:
    """A collective in flight; `wait` returns its result."""

    def __init__(self, work: Work | None, result: Any, ledger: Ledger, purpose: str) -> None:
        self._work, self._result = work, result
        self._ledger, self._purpose = ledger, purpose

    def done(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return self._work is None or self._work.done()

    def wait(self) -> Any:
        """Wait for the result, counting the time."""
        if self._work is not None:
            start = time.perf_counter()
            self._work.wait()
            self._ledger.waits[self._purpose] += time.perf_counter() - start
            self._work = None
        return self._result


class Channel:
    """A group of ranks, with every call counted in a ledger.

    Nothing is sent in a group of one rank.

    Attributes:
        comm: The ranks.
        name: What their bytes are counted under.
        ledger: Where they are counted.
        device: Where arrays are made, ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, comm: Communicator, name: str, ledger: Ledger, device: str = "cpu") -> None:
        self.comm, self.name, self.ledger, self.device = comm, name, ledger, device

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self.comm.world_size

    def empty(self, count: int, dtype: Any, kind: str) -> Any:
        """Allocate `count` elements of symmetric memory, counted under a kind.

        What comes and goes within a step is made of blocks that the pool has kept.
        """
        return self.ledger.track(self.comm.empty(count, dtype, device=self.device), kind)

    def all_reduce(self, x: Any, purpose: str, order: str | None = None) -> Pending:
        """Start to add `x` over the ranks, in place."""
        return self._start("all_reduce", x.nbytes, purpose, x, x, order=order)

    def reduce_scatter(self, x: Any, out: Any, purpose: str, order: str | None = None) -> Pending:
        """Start to add `x` over the ranks; rank r gets block r in `out`."""
        if self.world_size == 1:
            out[...] = x
        return self._start("reduce_scatter", x.nbytes, purpose, x, out, order=order)

    def all_gather(self, x: Any, out: Any, purpose: str) -> Pending:
        """Start to concatenate `x` of all ranks in `out`."""
        if self.world_size == 1:
            out[...] = x
        return self._start("all_gather", out.nbytes, purpose, x, out)

    def _start(
        self, collective: str, nbytes: int, purpose: str, x: Any, out: Any, **options: Any
    ) -> Pending:
        n = self.world_size
        if n == 1:
            return Pending(None, out, self.ledger, purpose)
        self.ledger.wire[purpose, self.name] += VOLUME[collective](n, nbytes)
        self.ledger.calls[purpose, self.name, collective] += 1
        work = getattr(self.comm, collective)(x, out=out, async_op=True, **options)
        return Pending(work, out, self.ledger, purpose)

    def gather_rows(self, row: Any, purpose: str) -> Any:
        """Return the equally long rows of all ranks, ``[world_size, count]``."""
        row = row.reshape(1, -1)
        if self.world_size == 1:
            return row.copy()
        n = self.world_size
        self.ledger.wire[purpose, self.name] += VOLUME["all_gather"](n, n * row.nbytes)
        self.ledger.calls[purpose, self.name, "all_gather"] += 1
        start = time.perf_counter()
        table = self.comm.all_gather(row)
        self.ledger.waits[purpose] += time.perf_counter() - start
        return table

"""Groups of ranks whose traffic and memory are counted: ledger, channels, channels of a mesh."""

from __future__ import annotations

import copy
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycoll.comm import Communicator, Work
from pycoll.errors import ArgumentError
from pycoll.parallel.mesh import Mesh

_GOSSIP = 1  # tag

AXES = ("replica", "dp", "cp", "tp")
"""Axes of a mesh that data parallelism knows; pipelines know ``pp``, too."""

VOLUME: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, nbytes: -(-2 * (n - 1) * nbytes // n),
    "reduce_scatter": lambda n, nbytes: -(-(n - 1) * nbytes // n),
    "all_gather": lambda n, nbytes: -(-(n - 1) * nbytes // n),
    "neighbours": lambda n, nbytes: min(2, n - 1) * nbytes,
}
"""Bytes that each of n ranks sends for a full vector of nbytes, bandwidth-optimal algorithm.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009, section 3;
ring and halving-doubling both reach it.
"""


class Ledger:
    """Counts bytes of one rank.

    Attributes:
        live: Bytes held now, by kind (``parameter``, ``gradient``, ``optimizer``, ...). An array
            counts until it is collected.
        peak: Largest sum of `live` since the last `reset_peak`.
        wire: Bytes sent, by ``(purpose, group)``; purposes are ``gradient``, ``parameter``,
            ``norm``, ``count``, ...
        calls: Number of collectives, by ``(purpose, group, collective)``.
        waits: Seconds spent waiting for communication, by purpose.
        stored: Bytes in a file now, by kind: ``optimizer`` and ``activation``.
        stored_peaks: Largest bytes of each of these since the last `reset_peak`.
        bucket_waits: Of `waits`, seconds for reductions of each bucket, by its first parameter.
        peaks: Largest bytes of each kind since the last `reset_peak`.
    """

    def __init__(self) -> None:
        self.stored: Counter[str] = Counter()
        self.stored_peaks: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak: int = 0
        self.wire: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.bucket_waits: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self._tracked: set[int] = set()

    def track(self, array: Any, kind: str) -> Any:
        """Count ``array`` under ``kind`` until it is collected, once; return it."""
        if id(array) in self._tracked:  # a layer may return the same one in every step
            return array
        self._tracked.add(id(array))
        self.live[kind] += array.nbytes
        weakref.finalize(array, self._forget, id(array), kind, array.nbytes).atexit = False
        self.peak = max(self.peak, self.total)
        self.peaks[kind] = max(self.peaks[kind], self.live[kind])
        return array

    def hold(self, kind: str, nbytes: int) -> None:
        """Count bytes of ``kind`` in memory now, or if `nbytes` is negative no longer."""
        self.live[kind] += nbytes
        self.peak = max(self.peak, self.total)
        self.peaks[kind] = max(self.peaks[kind], self.live[kind])

    def store(self, kind: str, nbytes: int) -> None:
        """Count bytes of ``kind`` in a file now, or if `nbytes` is negative no longer."""
        self.stored[kind] += nbytes
        self.stored_peaks[kind] = max(self.stored_peaks[kind], self.stored[kind])

    def _forget(self, array: int, kind: str, nbytes: int) -> None:
        self._tracked.discard(array)
        self.live[kind] -= nbytes

    @property
    def total(self) -> int:
        """Bytes held now, all kinds."""
        return sum(self.live.values())

    def reset_peak(self) -> None:
        """Start to look for a new peak from what is held now."""
        self.peak, self.peaks = self.total, Counter(self.live)
        self.stored_peaks = Counter(self.stored)

    def count(self, collective: str, purpose: str, group: str, n: int, nbytes: int) -> None:
        """Count a ``collective`` of ``n`` ranks of ``group`` on ``nbytes`` for ``purpose``."""
        self.wire[purpose, group] += VOLUME[collective](n, nbytes)
        self.calls[purpose, group, collective] += 1

    @contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Count the time of a block as waiting for ``purpose``."""
        start = time.perf_counter()
        yield
        self.waits[purpose] += time.perf_counter() - start

    def mark(self) -> tuple[Counter[tuple[str, str]], Counter[str], Counter[str]]:
        """Start to look for new peaks; return what `since` compares with."""
        self.reset_peak()
        return Counter(self.wire), Counter(self.waits), Counter(self.bucket_waits)

    def since(
        self, mark: tuple[Counter[tuple[str, str]], Counter[str], Counter[str]]
    ) -> dict[str, Any]:
        """Return what has been counted since ``mark``, as a `StepReport` names it."""
        wire, waits, bucket_waits = mark
        return {
            "bytes": self.sent_since(wire),
            "waits": dict(self.waits - waits),
            "bucket_waits": dict(self.bucket_waits - bucket_waits),
            "peak_bytes": self.peak,
            "peaks": dict(self.peaks),
            "stored": dict(self.stored_peaks),
        }

    def sent_since(self, before: Counter[tuple[str, str]]) -> dict[str, int]:
        """Return the bytes sent since `wire` was `before`, by purpose."""
        sent: Counter[str] = Counter()
        for (purpose, _), nbytes in (self.wire - before).items():
            sent[purpose] += nbytes
        return dict(sent)


class Pending:
    """A collective in flight; `wait` returns its result."""

    def __init__(self, work: Work | None, result: Any, ledger: Ledger, purpose: str) -> None:
        self._work, self._result = work, result
        self._ledger, self._purpose = ledger, purpose
        self._steps: list[Callable[[Any], Any]] = []

    def then(self, step: Callable[[Any], Any]) -> Pending:
        """Let the first `wait` replace the result by a function of it; return self."""
        self._steps.append(step)
        return self

    def wait(self) -> Any:
        """Wait for the result, counting the time."""
        if self._work is not None:
            with self._ledger.waiting(self._purpose):
                self._work.wait()
            self._work = None
        while self._steps:
            self._result = self._steps.pop(0)(self._result)
        return self._result


class Channel:
    """A group of ranks; every call is counted in a ledger. A group of one rank sends nothing.

    `name` is that of the group in the ledger; arrays are made on `device`, ``"cpu"`` or ``"cuda"``.
    In errors the ranks are called `ranks`.
    """

    def __init__(self, comm: Communicator, name: str, ledger: Ledger, device: str = "cpu") -> None:
        self.comm = comm
        self.name = name
        self.ledger = ledger
        self.device = device
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.ranks: Sequence[int] = range(comm.world_size)

    def empty(self, count: int, dtype: Any, kind: str) -> Any:
        """Allocate `count` elements of symmetric memory, counted under a kind.

        Blocks that are freed and allocated again within a step come from the pool of the heap.
        """
        return self.ledger.track(self.comm.empty(count, dtype, device=self.device), kind)

    def all_reduce(self, x: Any, purpose: str, order: str | None = None) -> Pending:
        """Start to add `x` over the ranks, in place."""
        return self._start("all_reduce", x.nbytes, purpose, x, x, order=order)

    def total(self, x: Any, purpose: str, order: str | None = None) -> Any:
        """Add `x` over the ranks, in place, and return it: nothing else is done meanwhile."""
        if self.world_size > 1:
            self.ledger.count("all_reduce", purpose, self.name, self.world_size, x.nbytes)
            with self.ledger.waiting(purpose):
                self.comm.all_reduce(x, out=x, order=order)
        return x

    def reduce_scatter(self, x: Any, out: Any, purpose: str, order: str | None = None) -> Pending:
        """Start to add `x` over the ranks; rank r gets block r in `out`."""
        return self._start("reduce_scatter", x.nbytes, purpose, x, out, order=order)

    def all_gather(self, x: Any, out: Any, purpose: str) -> Pending:
        """Start to concatenate `x` of all ranks in `out`."""
        return self._start("all_gather", out.nbytes, purpose, x, out)

    def neighbours(self, x: Any, purpose: str) -> list[tuple[Work, Any]]:
        """Start to give `x` to the ranks before and after this one on a ring, and to get theirs.

        Returns:
            For each neighbour, one if there are two ranks: the call, and the array that it fills.
        """
        n, comm = self.world_size, self.comm
        ends = sorted({(self.rank - 1) % n, (self.rank + 1) % n} - {self.rank})
        if ends:
            self.ledger.count("neighbours", purpose, self.name, n, x.nbytes)
        found = []
        for end in ends:
            out = np.empty_like(x)
            found.append((comm.irecv(out, end, _GOSSIP), out))
        for end in ends:
            comm.isend(x, end, _GOSSIP)
        return found

    def _start(
        self, collective: str, nbytes: int, purpose: str, x: Any, out: Any, **options: Any
    ) -> Pending:
        if self.world_size == 1:
            if out is not x:
                out[...] = x
            return Pending(None, out, self.ledger, purpose)
        self.ledger.count(collective, purpose, self.name, self.world_size, nbytes)
        work = getattr(self.comm, collective)(x, out=out, async_op=True, **options)
        return Pending(work, out, self.ledger, purpose)

    def gather_rows(self, row: Any, purpose: str) -> Any:
        """Return the equally long rows of all ranks, ``[world_size, count]``."""
        row, n = row.reshape(1, -1), self.world_size
        if n == 1:
            return row.copy()
        self.ledger.count("all_gather", purpose, self.name, n, n * row.nbytes)
        with self.ledger.waiting(purpose):
            return self.comm.all_gather(row)


class Metered:
    """The collectives that layers use, on a communicator, counted in a ledger.

    Attributes:
        comm: The communicator; its own calls are not counted.
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
        """Count the calls on a communicator.

        Args:
            comm: The communicator; stays the caller's.
            ledger: The ledger.
            group: Name of the ranks in the ledger.
            purpose: What the bytes are for.
            order: Order of reductions; see `pycoll.Communicator.all_reduce`.
        """
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.comm = comm
        self._ledger = ledger
        self._order = order
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
        call = getattr(self.comm, collective)
        if self.world_size == 1:
            return call(x, **options)
        self._ledger.count(collective, self._purpose, self._group, self.world_size, nbytes)
        with self._ledger.waiting(self._purpose):
            return call(x, **options)


LayerComm = Communicator | Metered
"""Ranks that a layer is split over."""


def check_axis(axis: str, size: int, known: tuple[str, ...] = AXES) -> None:
    """Refuse an axis of a mesh that an engine does not know."""
    if axis not in known and size > 1:
        hint = "; Pipeline takes pp" if axis == "pp" else ""
        raise ArgumentError(
            f"the mesh has axis {axis}={size}; data parallelism knows {', '.join(known)}{hint}"
        )


class Groups:
    """Channels along the axes of a mesh.

    They are duplicates, so that calls of layers on the mesh's own communicators never wait for
    calls of the engine. Each channel runs its calls in the order in which they were started: a
    gather may write into memory that an earlier reduction works on.

    Attributes:
        mesh: The mesh.
        axes: Sizes of the axes of `world`.
        ledger: Where bytes are counted.
        shards: The ranks that parameters are sharded over (``dp`` and ``cp``).
        replica: The copies of this shard.
        data: All ranks that see different samples or positions (``replica``, ``dp`` and ``cp``).
        tensor: The ranks that share a layer (``tp``).
        pipeline: The stages (``pp``).
        stage: All ranks of one stage.
        world: All ranks.
    """

    def __init__(
        self, mesh: Mesh, ledger: Ledger, device: str = "cpu", known: tuple[str, ...] = AXES
    ) -> None:
        """Make the channels, whose arrays are on a device; a collective.

        Raises:
            ArgumentError: If the mesh has an axis that data parallelism does not know.
        """
        for axis, size in mesh.axes.items():
            check_axis(axis, size, known)
        self.mesh = mesh
        self.ledger = ledger
        self._device = device
        self.axes: dict[str, int] = dict(mesh.axes)
        self._owned: list[Communicator] = []
        self.shards: Channel = self._duplicate("dp", mesh.group("dp", "cp"))
        self.replica: Channel = self._duplicate("replica", mesh.group("replica"))
        self.data: Channel = self._duplicate("data", mesh.group("replica", "dp", "cp"))
        self.tensor: Channel = self._duplicate("tp", mesh.group("tp"))
        self.world: Channel = self._duplicate("world", mesh.world)
        self.stage: Channel = self.world
        self.pipeline: Channel = Channel(mesh.group("pp"), "pp", ledger, device)
        if self.pipeline.world_size > 1:
            self.pipeline = self._duplicate("pp", mesh.group("pp"))
            self.stage = self._duplicate("stage", mesh.group("replica", "dp", "cp", "tp"))
            self.stage.ranks = mesh.members("replica", "dp", "cp", "tp")

    def of_stage(self) -> Groups:
        """Return these groups for calls that only the ranks of this stage make."""
        own = copy.copy(self)
        own.world = self.stage
        own.axes = {axis: size for axis, size in self.axes.items() if axis != "pp"}
        return own

    def of_replica(self) -> Groups:
        """Return these groups for calls that the ranks of one replica make alone; a collective."""
        own = copy.copy(self)
        own.replica = self._duplicate("replica alone", self.mesh.group())
        own.data = self.shards
        own.axes = {axis: size for axis, size in self.axes.items() if axis != "replica"}
        own.world = own.stage = self._duplicate("one replica", self.mesh.group(*own.axes))
        own.world.ranks = self.mesh.members(*own.axes)
        return own

    def use(self, other: Groups) -> None:
        """Have the channels of other groups of the same mesh from now on."""
        self.replica, self.data, self.axes = other.replica, other.data, other.axes
        self.world, self.stage = other.world, other.stage

    def _duplicate(self, name: str, comm: Communicator) -> Channel:
        self._owned.append(comm.dup())
        return Channel(self._owned[-1], name, self.ledger, self._device)

    @property
    def place(self) -> str:
        """Rank and mesh of this process as text."""
        axes = {axis: size for axis, size in self.mesh.axes.items() if size > 1} or {"dp": 1}
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        return f"rank {self.mesh.world.rank} of {sizes}"

    def close(self, error: BaseException | None = None) -> None:
        """Close the channels, with an error for the ranks that wait; not a collective."""
        for comm in self._owned:
            comm.__exit__(type(error) if error else None, error, None)

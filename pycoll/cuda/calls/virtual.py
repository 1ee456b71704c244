"""Ranks that live on one device in one process: every collective is one cooperative launch.

The plans are the ones that processes run, and the results have the same bits, so one device is
enough to run, test and measure kernels of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int
from functools import partial
from typing import Any

import numpy as np

from pycoll.config import check_timeout
from pycoll.cuda.calls.in_order import LaunchOrder
from pycoll.cuda.calls.made_before import MadeBefore
from pycoll.cuda.calls.norm import NormRanks
from pycoll.cuda.calls.prepare import DeviceCaller, DevicePlans
from pycoll.cuda.calls.ragged import RaggedRanks
from pycoll.cuda.device import arrays
from pycoll.cuda.device.heap import AnyMemory
from pycoll.cuda.device.library import BEST, MAX_RANKS, CallInfo, KernelError, library, pointers
from pycoll.cuda.transports.base import kernel_failure, root_cause, wait_for
from pycoll.cuda.transports.bound_calls import TIMEOUT_S, CallCache, nanoseconds
from pycoll.errors import ArgumentError, CollError, CommClosed
from pycoll.runtime.arrays.layouts import RESULT_SHAPE, ChunkLayout
from pycoll.runtime.calls.plans import CallSpec
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.schedule.language.collectives import COLLECTIVES, OWN
from pycoll.types import Kind

MAX_BLOCKS = 256  # of a rank
_CELL_BYTES = 32 << 20


class VirtualRanks(NormRanks, RaggedRanks):
    """n ranks on one CUDA device; made by `pycoll.virtual_ranks`.

    Collectives take the arrays of all ranks at once, as a list of n arrays or as one array with
    shape ``[n, ...]``, and return a list or a stacked array likewise. Of a collective with a root
    only the root has a result: a list has None elsewhere, and of a stacked array it is the root's.

    Calls are ordered by their stream and asynchronous, and may be captured into a CUDA graph after
    one run outside of it. `op`, `order`, `algorithm` and `out` mean what they do for a
    `pycoll.Communicator`.
    """

    def __init__(self, n: int, device: int = 0) -> None:
        """See `pycoll.virtual_ranks`."""
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_RANKS:
            raise ArgumentError(f"n={n!r}; accepted: 1 to {MAX_RANKS} ranks")
        self._group = 0
        count = library().device_count()
        if not 0 <= device < count:
            raise ArgumentError(f"device={device!r}; accepted: 0 to {count - 1}")
        self._cupy = arrays.cupy()
        self.world_size = n
        self.device = device
        self._group = library().pointer("group_virtual", device, n, MAX_BLOCKS)
        self._calls = CallCache(self._group, n, range(n))
        self._launches = LaunchOrder()
        self._made = MadeBefore()
        self._cells: list[int] = []

    def all_reduce(self, xs: Any, op: str = "sum", **options: Any) -> Any:
        """Combine the arrays of all ranks; every rank gets the result.

        Args:
            xs: The arrays of the ranks: n of them, or one with shape ``[n, ...]``.
            op: Operation, as for `pycoll.Communicator.all_reduce`.
            **options: ``out`` (like ``xs``), ``order``, ``algorithm``, ``timeout`` (seconds until
                a rank that waits for another one gives up), ``stream``.

        Returns:
            The results of the ranks, in the form of ``xs``.
        """
        return self._run(Kind.ALL_REDUCE, xs, op=op, **options)

    def reduce_scatter(self, xs: Any, op: str = "sum", **options: Any) -> Any:
        """Combine all arrays; rank r gets block r; arguments as for `all_reduce`."""
        return self._run(Kind.REDUCE_SCATTER, xs, op=op, **options)

    def reduce(self, xs: Any, op: str = "sum", *, root: int = 0, **options: Any) -> Any:
        """Combine the arrays of all ranks on the root; arguments as for `all_reduce`."""
        return self._run(Kind.REDUCE, xs, op=op, root=root, **options)

    def all_gather(self, xs: Any, **options: Any) -> Any:
        """Concatenate all arrays along their first axis; arguments as for `all_reduce`."""
        return self._run(Kind.ALL_GATHER, xs, **options)

    def broadcast(self, xs: Any, root: int = 0, **options: Any) -> Any:
        """Copy the root's array into those of all ranks, or to ``out``; see `all_reduce`."""
        if options.get("out") is None:
            options["out"] = xs
        return self._run(Kind.BROADCAST, xs, root=root, **options)

    def gather(self, xs: Any, root: int = 0, **options: Any) -> Any:
        """Concatenate all arrays on the root; arguments as for `all_reduce`."""
        return self._run(Kind.GATHER, xs, root=root, **options)

    def scatter(self, xs: Any, root: int = 0, **options: Any) -> Any:
        """Give rank r block r of the root's array; arguments as for `all_reduce`."""
        return self._run(Kind.SCATTER, xs, root=root, **options)

    def all_to_all(self, xs: Any, **options: Any) -> Any:
        """Send block j of each rank to rank j; arguments as for `all_reduce`."""
        return self._run(Kind.ALL_TO_ALL, xs, **options)

    def _run(
        self,
        kind: Kind,
        xs: Any,
        *,
        out: Any = None,
        timeout: float | None = None,
        stream: Any = None,
        **request: Any,
    ) -> Any:
        limit = TIMEOUT_S if timeout is None else check_timeout(timeout)
        wanted = CallRequest(kind, **request)
        handle, key = arrays.stream_of(stream), None
        if out is not None and not _root_only(wanted):
            key = self._made.key(wanted, handle, xs, out)
        known = self._made.find(key, (xs, out), (None,) * self.world_size)
        if known is None:
            launch = self.bind(kind, xs, out=out, stream=stream, **request)
            self._made.note(key, launch.prepared)
        else:
            launch = Launch(self, known[0], handle, out)
        return launch(limit)

    def bind(
        self,
        collective: str | Kind,
        xs: Any,
        *,
        out: Any = None,
        stream: Any = None,
        **request: Any,
    ) -> Launch:
        """Prepare a collective on given arrays, to launch it many times.

        Args:
            collective: Its name, such as ``"all_reduce"``.
            xs: The arrays of the ranks.
            out: Arrays for the results, like ``xs``.
            stream: Where it runs.
            **request: ``op``, ``root``, ``order``, ``algorithm``.
        """
        self.check()
        stream = self._cupy.cuda.get_current_stream() if stream is None else stream
        handle = arrays.stream_of(stream)
        stacked = not isinstance(xs, (list, tuple))
        wanted = CallRequest(_kind_of(collective), **request)
        with self._cupy.cuda.Device(self.device), arrays.external(handle):
            inputs, outputs = self._split(xs, "xs"), self._split(out, "out")
            if stacked and out is None:
                out, outputs = self._stack(wanted, inputs[0])
            pairs = list(zip(inputs, outputs, strict=True))
            in_place = out is xs or any(x is target for x, target in pairs)
            prepared = [
                self._prepare(rank, wanted, *pair, handle, in_place)
                for rank, pair in enumerate(pairs)
            ]
        specs = {p.spec for p in prepared}
        if len(specs) > 1:
            raise ArgumentError("the arrays of all ranks must have the same shape and dtype")
        _check_apart(prepared, self.world_size)
        results: Any = [p.result for p in prepared]
        if stacked:
            results = results[wanted.root] if _root_only(wanted) else out
        return Launch(self, prepared, stream, results)

    def _opened(self) -> int:
        if not self._group:
            raise CommClosed("these virtual ranks have been closed")
        return self._group

    def _prepare(
        self, rank: int, request: CallRequest, x: Any, out: Any, stream: int, in_place: bool
    ) -> Prepared:
        plans = DevicePlans(rank, self.world_size, messages=False)
        caller = DeviceCaller(plans, AnyMemory(), self.device, stream, True, in_place)
        at_root = rank == request.root or not _root_only(request)
        return caller.prepare(request, x, out if at_root else None)

    def _split(self, given: Any, what: str) -> list[Any]:
        """Return one array, or None, for each rank."""
        if given is None:
            return [None] * self.world_size
        if len(given) != self.world_size:
            raise ArgumentError(f"{what} has {len(given)} arrays for {self.world_size} ranks")
        return [given[rank] for rank in range(self.world_size)]

    def _stack(self, request: CallRequest, x: Any) -> tuple[Any, list[Any]]:
        """Make one array for the results of all ranks, where all of them have one."""
        if _root_only(request):
            return None, [None] * self.world_size
        shape = RESULT_SHAPE[request.kind](tuple(x.shape), self.world_size)
        out = self._cupy.empty((self.world_size, *shape), x.dtype)
        return out, self._split(out, "out")

    def launch(
        self,
        prepared: Sequence[Prepared],
        stream: int,
        limit: float,
        *,
        blocks: int = 0,
        threads: int = 0,
        method: int = BEST,
        absent: int = 0,
        table: ChunkLayout | None = None,
    ) -> None:
        """Put one launch on a stream; see ``pycoll_cuda_launch``."""
        self.check()
        spec = prepared[0].spec
        self._connect(spec)
        capturing = self._launches.capturing(stream)
        call = self._calls.find(spec, pin=capturing, table=table)
        ins = pointers(p.in_ptr for p in prepared)
        outs = pointers(p.out_ptr for p in prepared)
        form = blocks, threads, method, nanoseconds(limit), absent, stream
        with self._cupy.cuda.Device(self.device):
            launch = partial(library().call, "launch", call, ins, outs, *form)
            self._launches.put(prepared, stream, capturing, launch)

    def _connect(self, spec: CallSpec) -> None:
        """Give the ranks scratch memory when the first plan with slots comes."""
        if self._cells or spec in self._calls:
            return
        if not spec.algorithm.schedule(self.world_size, **dict(spec.params)).slots:
            return
        size = 2 * _CELL_BYTES
        made = [library().pointer("malloc", self.device, size) for _ in range(self.world_size)]
        library().call("group_connect", self._group, None, None, 0, pointers(made), _CELL_BYTES)
        self._cells = made

    def info(self, launch: Launch, method: int = BEST) -> CallInfo:
        """Tell which kernel runs a prepared collective, with blocks, threads and registers."""
        self._opened()
        self._connect(launch.spec)
        return self._calls.info(launch.spec, method)

    def check(self) -> None:
        """Raise what has gone wrong on the device.

        Raises:
            CollTimeout: If a rank gave up waiting; the text says for whom, and at which step.
            CollError: If it failed otherwise. `reset` makes the ranks usable again.
        """
        failed = c_int()
        library().call("group_failed", self._opened(), byref(failed))
        if failed.value:
            raise self._failure()

    def _failure(self) -> CollError:
        records = [KernelError() for _ in range(self.world_size)]
        for rank, record in enumerate(records):
            library().call("group_error", self._group, rank, byref(record))
        return kernel_failure(root_cause(records)) or CollError("the kernel was aborted")

    def synchronize(self, timeout: float = 300.0) -> None:
        """Wait on the host for everything that was launched, and raise what went wrong."""
        if self._launches.last is not None:
            wait_for(self._launches.last, timeout, "the kernel")
        self.check()

    def abort(self) -> None:
        """Make the running kernel leave; later calls raise until `reset`."""
        library().call("group_abort", self._opened())

    def reset(self) -> None:
        """Make the ranks usable again after a failure; waits for the device."""
        library().call("group_reset", self._opened())

    def close(self) -> None:
        """Wait for the device and free what the ranks have; harmless if repeated."""
        if self._group:
            self._calls.clear()
            library().call("group_destroy", self._group)
            for cell in self._cells:
                library().call("free", cell)
            self._group, self._cells = 0, []
            self._launches.clear()

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<pycoll.VirtualRanks {self.world_size} on device {self.device}>"


class Launch:
    """A collective on given arrays of virtual ranks, ready to be launched many times."""

    def __init__(
        self, ranks: VirtualRanks, prepared: list[Prepared], stream: Any, results: Any
    ) -> None:
        """Keep what is needed; see `VirtualRanks.bind`."""
        self._launch, self._launched = ranks.launch, False
        self.prepared = prepared
        self._results = results
        self._copies = [copy for p in prepared for copy in p.gathers]
        self._stream, self._alive = arrays.stream_of(stream), stream
        self.spec: CallSpec = prepared[0].spec

    def __call__(self, limit: float = TIMEOUT_S, **options: Any) -> Any:
        """Launch it once and return the results; ``options`` are those of `VirtualRanks.launch`."""
        limit = check_timeout(limit)
        stream = arrays.stream_of(options.pop("stream")) if "stream" in options else self._stream
        for copy in self._copies if self._launched else ():
            if not copy.repeatable:
                raise ArgumentError("an input is not contiguous; such a call can be launched once")
            library().copy(copy.address, copy.given.pointer, copy.given.array.nbytes, stream)
        self._launch(self.prepared, stream, limit, **options)
        self._launched = True
        return self._results


def _kind_of(collective: str | Kind) -> Kind:
    """Return the kind of a collective of that name."""
    name = collective if isinstance(collective, str) else collective.name.lower()
    if name not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ArgumentError(f"collective={collective!r} is not known; accepted: {known}")
    return Kind[name.upper()]


def _root_only(request: CallRequest) -> bool:
    """Tell whether only the root has a result."""
    return COLLECTIVES[request.collective].out_at_root


def _check_apart(prepared: Sequence[Prepared], n: int) -> None:
    """Refuse an output that shares memory with an array of another rank.

    Raises:
        ArgumentError: Naming the two ranks.
    """
    spec = prepared[0].spec
    promise = COLLECTIVES[spec.collective]
    sizes = [
        spec.count * spec.itemsize // (n if layout == OWN else 1)
        for layout in (promise.in_layout, promise.out_layout)
    ]
    starts = np.array([(p.in_ptr, p.out_ptr) for p in prepared], np.uint64).astype(np.int64)
    ends = np.where(starts > 0, starts + sizes, starts)
    low, high = starts[:, 1], ends[:, 1]
    for other in (0, 1):
        first, last = starts[:, other], ends[:, other]
        shared = (low[:, None] < last[None]) & (first[None] < high[:, None])
        np.fill_diagonal(shared, False)
        if shared.any():
            a, b = np.argwhere(shared)[0].tolist()
            raise ArgumentError(f"the output of rank {a} overlaps an array of rank {b}")

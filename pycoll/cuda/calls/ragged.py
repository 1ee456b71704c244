"""The v-variants on devices: blocks whose sizes differ, by plans with tables of where chunks lie.

Between processes `pycoll.runtime.calls.parts.v_variants` exchanges the sizes on the host, wherever
arrays are; `DeviceRows` is what it does with those on a device. They go through the staging
buffers.
Virtual ranks know all sizes, and work on arrays where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pycoll import algorithms
from pycoll.config import check_timeout
from pycoll.cuda.device import arrays
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, as_reducible, check_output
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.arrays.ragged_blocks import sizes_of
from pycoll.runtime.calls.prepared import CallRequest, Prepared, table_spec
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

Extents = Callable[[np.ndarray], ChunkLayout]


def apart(source: ArrayView, target: ArrayView | None, stream: int) -> ArrayView:
    """Return a contiguous source that shares no memory with the target."""
    start, end = source.pointer, source.pointer + source.array.nbytes
    shares = target is not None and start < target.pointer + target.array.nbytes
    shares = shares and target.pointer < end
    if source.array.flags.c_contiguous and not shares:
        return source
    return arrays.duplicate(source, arrays.cupy().empty, stream)


class DeviceRows:
    """Arrays of one call on a device; see `pycoll.runtime.calls.parts.v_variants.HostRows`."""

    def __init__(self, side: Any) -> None:
        """Take part on a `pycoll.cuda.calls.side.DeviceSide`, on CuPy's current stream."""
        side.check()
        self._side, self._stream = side, arrays.stream_of(None)

    def view(self, x: Any, what: str) -> ArrayView:
        """Look at an array on the device of this rank."""
        return self._side.look(x, what, self._stream)

    def new_like(self, v: ArrayView, shape: tuple[int, ...]) -> Any:
        """Make an array like another one."""
        return arrays.new_like(v, shape)

    def apart(self, source: ArrayView, target: ArrayView | None) -> ArrayView:
        """Return a contiguous source that shares no memory with the target."""
        return apart(source, target, self._stream)

    def run(
        self,
        session: Session,
        call: tuple[CallRequest, str],
        source: ArrayView,
        target: ArrayView | None,
        blocks: tuple[np.ndarray, Extents, int],
        result: Any,
        limit: float,
        like: Any = None,
    ) -> Any:
        """Run a call; the arguments are those of `HostRows.run`."""
        (request, name), (lengths, extents, agreed) = call, blocks
        n = session.world_size

        def prepare() -> tuple[Prepared, ChunkLayout]:
            given = self.apart(source, target)
            where = extents(np.broadcast_to(lengths, (n, n)))
            algorithm = algorithms.find(request.collective, name)
            spec = table_spec(request, algorithm, source, where, agreed)
            ends = given.pointer, target.pointer if target is not None else 0
            return Prepared(None, *ends, result, (given, target), spec=spec), where

        self._side.call_table(*session.refusing(prepare), self._stream, limit)
        if not arrays.is_cupy(source.source):
            self._side.wait_for_last(limit)
        return result


class RaggedRanks:
    """The v-variants of `pycoll.cuda.calls.virtual.VirtualRanks`: lists in, lists out."""

    world_size: int
    launch: Any
    _cupy: Any
    device: int

    def all_gather_v(self, xs: Sequence[Any], **options: Any) -> list[Any]:
        """Concatenate arrays whose first dimensions may differ; every rank gets the result.

        Args:
            xs: The arrays of the ranks, a list of n.
            **options: ``out`` (a list likewise), ``timeout``, ``stream``.
        """
        return self._ragged(Kind.ALL_GATHER_V, "direct_pull", xs, None, **options)

    def reduce_scatter_v(
        self, xs: Sequence[Any], counts: Any, op: str = "sum", **options: Any
    ) -> list[Any]:
        """Combine all arrays; rank r gets the next ``counts[r]`` rows; see `all_gather_v`.

        ``order`` is one of the options.
        """
        rank_order = options.get("order") == "rank"
        name = "direct_rank" if rank_order else "direct"
        return self._ragged(Kind.REDUCE_SCATTER_V, name, xs, counts, op=op, **options)

    def all_to_all_v(self, xs: Sequence[Any], counts: Any, **options: Any) -> list[Any]:
        """Send ``counts[i][j]`` rows of rank i to rank j, in order; see `all_gather_v`."""
        return self._ragged(Kind.ALL_TO_ALL_V, "direct", xs, counts, **options)

    def sendrecv(
        self,
        xs: Sequence[Any],
        dsts: Sequence[int | None],
        *,
        out: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Send ``xs[r]`` from each rank r to rank ``dsts[r]``, as in a shift along a ring.

        Args:
            xs: The arrays of the ranks, a list of n; they may differ in their first dimension.
            dsts: To whom each rank sends; None: to nobody. Nobody is named twice.
            out: What ranks receive into; None where nothing comes.
            **options: ``timeout``, ``stream``; see `all_gather_v`.

        Returns:
            What each rank has received; None where nothing came.
        """
        n = self.world_size
        named = [dst for dst in dsts if dst is not None]
        if len(xs) != n or len(dsts) != n or (out is not None and len(out) != n):
            raise ArgumentError(f"a list of {n} is expected, one for each rank")
        if len(set(named)) < len(named) or not set(named) <= set(range(n)):
            raise ArgumentError(
                f"dsts={list(dsts)!r}; accepted: each of the ranks 0 to {n - 1} once, or None"
            )
        counts = np.zeros((n, n), np.int64)
        for rank, dst in enumerate(dsts):
            if dst is not None:
                counts[rank, dst] = len(xs[rank])
        given = [x if dst is not None else x[:0] for x, dst in zip(xs, dsts, strict=True)]
        if out is not None:
            out = [xs[r][:0] if array is None else array for r, array in enumerate(out)]
        results = self._ragged(Kind.ALL_TO_ALL_V, "direct", given, counts, out=out, **options)
        return [result if r in named else None for r, result in enumerate(results)]

    def _ragged(
        self,
        kind: Kind,
        name: str,
        xs: Sequence[Any],
        counts: Any,
        *,
        op: str = "sum",
        order: str = "tree",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> list[Any]:
        n = self.world_size
        if len(xs) != n or (out is not None and len(out) != n):
            raise ArgumentError(f"a list of {n} arrays is expected, one for each rank")
        reduces = kind == Kind.REDUCE_SCATTER_V
        request = CallRequest(kind, op, order=order if reduces else None)
        handle = arrays.stream_of(stream)
        with self._cupy.cuda.Device(self.device), arrays.external(handle):
            given = [arrays.device_view(x, "xs", handle) for x in xs]
            sizes = sizes_of(kind, given, counts, n)
            results = self._results(given, sizes, out, handle)
            targets = [arrays.device_view(x, "out", handle) for x in results]
            sources = [
                apart(source, None if reduces else target, handle)
                for source, target in zip(given, targets, strict=True)
            ]
            if reduces:
                sources = [as_reducible(v, op, "xs") for v in sources]
                targets = [as_reducible(v, op, "out") for v in targets]
        self._check_apart(sources, targets)
        where = sizes.layout(sources[0].array.size // max(1, given[0].array.size))
        algorithm = algorithms.find(request.collective, name)
        spec = replace(table_spec(request, algorithm, sources[0], where), direct=True)
        calls = [
            Prepared(None, a.pointer, b.pointer, result, (a, b), spec=spec)
            for a, b, result in zip(sources, targets, results, strict=True)
        ]
        limit = 60.0 if timeout is None else check_timeout(timeout)
        self.launch(calls, handle, limit, table=where)
        return results

    def _results(
        self, given: list[ArrayView], sizes: Any, out: Sequence[Any] | None, stream: int
    ) -> list[Any]:
        """Return the arrays for the results, checked if they were given."""
        made = []
        for rank, v in enumerate(given):
            shape = (sizes.rows_out[rank], *v.array.shape[1:])
            result = arrays.new_like(v, shape) if out is None else out[rank]
            check_output(arrays.device_view(result, "out", stream), shape, v)
            made.append(result)
        return made

    def _check_apart(self, sources: list[ArrayView], targets: list[ArrayView]) -> None:
        """Refuse an output that shares memory with an array of any rank.

        Raises:
            ArgumentError: Naming the rank.
        """
        for rank, target in enumerate(targets):
            others = [v for r, v in enumerate(targets) if r != rank] + sources
            end = target.pointer + target.array.nbytes
            if any(v.pointer < end and target.pointer < v.pointer + v.array.nbytes for v in others):
                raise ArgumentError(f"the output of rank {rank} overlaps an array of the call")

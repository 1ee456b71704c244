"""The operations that move tensors: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import ArgumentError
from pycoll.torch.arguments import (
    block_bytes,
    check_count,
    check_list,
    check_same_size,
    check_share,
    columns,
    pairs,
    root_of,
    single,
)
from pycoll.torch.core import Job
from pycoll.torch.devices import on_host
from pycoll.torch.lists import as_bytes, deal, pack, room
from pycoll.torch.tensors import check_output, source, store, target
from pycoll.torch.work import Tensors
from pycoll.types import Kind


class Moves:
    """Mixed into a process group."""

    def _move(
        self, kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None, *args: Any
    ) -> None:
        self._calls_for(x, out).move(kind, x, out, *args)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the root's tensor."""
        opts = c10d.BroadcastOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            tensor, root = single(tensors, "broadcast"), root_of(opts, self._size)
            box = source(tensor, "the tensor")
            x = box if self._rank == root else None
            if x is None:
                check_output(tensor, "the tensor")

            def job() -> None:
                self._move(Kind.BROADCAST, x, box, box.numel(), root, site, limit)
                if x is None:
                    store(box, tensor)

            return job, tensors

        return self._start("broadcast", prepare, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the tensors of all, as a list. They may differ in size."""
        opts = c10d.AllgatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            parts, given = single(outputs, "all_gather"), single(inputs, "all_gather")
            return self._gather_list(parts, given, opts), parts

        return self._start("all_gather", prepare, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `allgather` for several tensors: ``outputs[rank][i]`` is ``inputs[i]`` of a rank."""
        opts = c10d.AllgatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            lists = columns(outputs, inputs, self._size)
            jobs = [self._gather_list(parts, x, opts) for parts, x in lists]
            return lambda: [job() for job in jobs], [t for row in outputs for t in row]

        return self._start("all_gather_coalesced", prepare, opts)

    def _gather_list(self, parts: Tensors, given: torch.Tensor, opts: Any) -> Job:
        limit, site = self._limit(opts), self._calls.sites.here()
        x, own = source(given), f"tensor {self._rank} of the output list"
        check_list(parts, self._size, given, "the output list", output=True)
        check_same_size(given, "the input", parts[self._rank], f"{own}, this rank's")
        sizes = [part.numel() for part in parts]
        flat = room(self._calls, given, sum(sizes))

        def job() -> None:
            if len(set(sizes)) == 1:
                self._move(Kind.ALL_GATHER, x, flat, flat.numel(), 0, site, limit)
            else:
                self._session.place = site
                with on_host(x, flat) as (a, b):
                    self._session.all_gather_v(as_bytes(a), as_bytes(b), limit)
            deal(flat, parts)

        return job

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Give every rank the tensors of all, one behind the other."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._start(
            "all_gather", lambda: (self._gather_flat([output], [input], opts), [output]), opts
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `all_gather_single` for several tensors."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._start(
            "all_gather_coalesced",
            lambda: (self._gather_flat(outputs, inputs, opts), list(outputs)),
            opts,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_flat(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Job:
        limit, site = self._limit(opts), self._calls.sites.here()
        calls = []
        for output, given in pairs(outputs, inputs):
            check_share(given, output, self._size, ("the input", "the output"))
            calls.append((source(given), target(output), output))

        def job() -> None:
            for x, out, output in calls:
                self._move(Kind.ALL_GATHER, x, out, out.numel(), 0, site, limit)
                store(out, output)

        return job

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give the root the tensors of all, as a list."""
        opts = c10d.GatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            x, root = source(single(inputs, "gather")), root_of(opts, self._size)
            count, flat, parts = self._size * x.numel(), None, []
            if self._rank == root:
                parts = single(outputs, "gather")
                check_list(parts, self._size, x, "the output list", equal=True, output=True)
                flat = room(self._calls, x, count)

            def job() -> None:
                self._move(Kind.GATHER, x, flat, count, root, site, limit)
                if flat is not None:
                    deal(flat, parts)

            return job, parts if self._rank == root else inputs

        return self._start("gather", prepare, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Give rank r the r-th tensor of the root's list."""
        opts = c10d.ScatterOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            output, root = single(outputs, "scatter"), root_of(opts, self._size)
            out, x = target(output), None
            if self._rank == root:
                parts = single(inputs, "scatter")
                check_list(parts, self._size, output, "the input list", equal=True)
                x = pack(self._calls, parts)

            def job() -> None:
                count = self._size * out.numel()
                self._move(Kind.SCATTER, x, out, count, root, site, limit)
                store(out, output)

            return job, outputs

        return self._start("scatter", prepare, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send block j to rank j; the blocks are equal, or as long along dim 0 as told."""
        opts = c10d.AllToAllOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            x, out = source(input), target(output)
            even = not output_splits and not input_splits
            sent = block_bytes(x, input_splits, self._size, "input")
            received = block_bytes(out, output_splits, self._size, "output")
            self._check_blocks(x, out, sent, received)

            def job() -> None:
                if even:
                    self._move(Kind.ALL_TO_ALL, x, out, x.numel(), 0, site, limit)
                else:
                    self._session.place = site
                    self._exchange(x, sent, out, received, limit)
                store(out, output)

            return job, [output]

        return self._start("all_to_all", prepare, opts)

    alltoall_base = all_to_all_single

    def _exchange(
        self, x: torch.Tensor, sent: list[int], out: torch.Tensor, received: list[int], limit: float
    ) -> None:
        with on_host(x, out) as (a, b):
            self._session.all_to_all_v(as_bytes(a), sent, as_bytes(b), limit, received)

    def _check_blocks(
        self, x: torch.Tensor, out: torch.Tensor, sent: list[int], received: list[int]
    ) -> None:
        """Refuse blocks of which that for this rank itself does not fit, or another type."""
        own = self._rank
        if x.dtype != out.dtype or sent[own] != received[own]:
            raise ArgumentError(
                f"the output has {out.numel()} elements of {out.dtype}, the input {x.numel()} of "
                f"{x.dtype}; block {own}, from this rank to itself, has {sent[own]} bytes in the "
                f"input and {received[own]} in the output; expected the same size and type"
            )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send tensor j to rank j. They may differ in size."""
        opts = c10d.AllToAllOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            check_count(inputs, self._size, "the input list")
            self._check_lists(outputs, inputs)
            x, sent = pack(self._calls, inputs), [t.nbytes for t in inputs]
            received = [t.nbytes for t in outputs]
            out = room(self._calls, x, sum(t.numel() for t in outputs))

            def job() -> None:
                self._session.place = site
                self._exchange(x, sent, out, received, limit)
                deal(out, outputs)

            return job, outputs

        return self._start("all_to_all", prepare, opts)

    def _check_lists(self, outputs: Tensors, inputs: Tensors) -> None:
        for parts, what in ((outputs, "output"), (inputs, "input")):
            check_list(parts, self._size, inputs[0], f"the {what} list", output=parts is outputs)
        names = [f"tensor {self._rank} of the {what} list" for what in ("output", "input")]
        check_same_size(outputs[self._rank], names[0], inputs[self._rank], names[1])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank has called it."""
        opts = c10d.BarrierOptions() if opts is None else opts
        limit, site = self._limit(opts), self._calls.sites.here()
        return self._start("barrier", lambda: (lambda: self._meet(site, limit), []), opts)

    def _meet(self, site: int, limit: float) -> None:
        self._devices.drain()
        self._calls.barrier(site, limit)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has called it; after `timeout` tell what each rank is doing.

        Args:
            timeout: By default the group's.
            wait_all_ranks: Of no effect: the error always tells about all ranks.
        """
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        site = self._calls.sites.here()
        self._now("monitored_barrier", lambda: self._meet(site, limit), [])

"""The operations that move tensors: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import ArgumentError
from pycoll.runtime.calls import v_variants
from pycoll.torch.backend.core import Job
from pycoll.torch.calls.interrupts import ends_group
from pycoll.torch.calls.work import Tensors
from pycoll.torch.operations.arguments import (
    are_blocks,
    block_bytes,
    check_share,
    is_share,
    pairs,
    root_of,
    single,
)
from pycoll.torch.operations.contributions import unwritten
from pycoll.torch.tensors.blocks import as_bytes
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import check_output, name_of, source, store, target
from pycoll.types import Kind


class Moves:
    """Mixed into a process group."""

    def _move(
        self, kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None, *args: Any
    ) -> None:
        self._calls_for(x, out).move(kind, x, out, *args)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the root's tensor."""
        try:
            opts = c10d.BroadcastOptions() if opts is None else opts
            key = None
            if len(tensors) == 1:
                key = Kind.BROADCAST, tensors[0].dtype, tensors[0].numel(), None, opts.rootRank
                given = tensors[0] if self._rank == opts.rootRank else None
                work = self._again(key, given, tensors[0], opts)
                if work is not None:
                    return work

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

                return self._kept(job, key, tensor), tensors

            return self._start("broadcast", prepare, opts)
        except BaseException as error:
            self._ended_by(error)
            raise

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Give every rank the tensors of all, one behind the other."""
        try:
            opts = c10d.AllgatherOptions() if opts is None else opts
            key = None
            if is_share(input, output, self._size):
                key = Kind.ALL_GATHER, output.dtype, output.numel(), None, 0
                work = self._again(key, input, output, opts)
                if work is not None:
                    return work

            def prepare() -> tuple[Job, Tensors]:
                return self._kept(self._gather_flat([output], [input], opts), key, output), [output]

            return self._start("all_gather", prepare, opts)
        except BaseException as error:
            self._ended_by(error)
            raise

    _allgather_base = all_gather_single

    @ends_group
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
        given, boxes = [], []
        for output, x in pairs(outputs, inputs):
            check_share(x, output, self._size, ("the input", "the output"))
            given.append(source(x))
            boxes.append(target(output))
        given = unwritten(self._calls, given, [[output] for output in outputs])

        def job() -> None:
            for x, out, output in zip(given, boxes, outputs, strict=True):
                self._move(Kind.ALL_GATHER, x, out, out.numel(), 0, site, limit)
                store(out, output)

        return self._in_parts(job, len(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send block j to rank j; the blocks are equal, or as long along dim 0 as told."""
        try:
            opts = c10d.AllToAllOptions() if opts is None else opts
            key = None
            if not output_splits and not input_splits and are_blocks(output, input, self._size):
                key = Kind.ALL_TO_ALL, input.dtype, input.numel(), None, 0
                work = self._again(key, input, output, opts)
                if work is not None:
                    return work

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

                return self._kept(job, key, input), [output]

            return self._start("all_to_all", prepare, opts)
        except BaseException as error:
            self._ended_by(error)
            raise

    alltoall_base = all_to_all_single

    def _exchange(
        self, x: torch.Tensor, sent: list[int], out: torch.Tensor, received: list[int], limit: float
    ) -> None:
        with on_host(x, out) as (a, b):
            flat, told = as_bytes(a), name_of(x.dtype)
            v_variants.all_to_all(self._session, flat, sent, as_bytes(b), limit, received, told)

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

    @ends_group
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank has called it."""
        opts = c10d.BarrierOptions() if opts is None else opts
        limit, site = self._limit(opts), self._calls.sites.here()
        return self._start("barrier", lambda: (lambda: self._meet(site, limit), []), opts)

    def _meet(self, site: int, limit: float) -> None:
        self._devices.drain()
        self._calls.barrier(site, limit)

    @ends_group
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

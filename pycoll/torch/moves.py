"""The operations that move tensors: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import ArgumentError
from pycoll.torch.core import Job
from pycoll.torch.reductions import single
from pycoll.torch.tensors import source, store, target
from pycoll.torch.work import Tensors
from pycoll.types import Kind


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([source(tensor).reshape(-1) for tensor in tensors])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _deal(flat: torch.Tensor, tensors: Tensors) -> None:
    """Cut a flat tensor into pieces and store them."""
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.data.copy_(piece.view(tensor.shape))


class Moves:
    """Mixed into a process group."""

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the root's tensor."""
        opts = c10d.BroadcastOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site, root = self._limit(opts), self._calls.sites.here(), opts.rootRank
            tensor = single(tensors, "broadcast")
            box = source(tensor, "the tensor")
            x = box if self._rank == root else None

            def job() -> None:
                self._calls.move(Kind.BROADCAST, x, box, box.numel(), root, site, limit)
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
            lists = [list(column) for column in zip(*outputs, strict=True)]
            jobs = [self._gather_list(p, x, opts) for p, x in zip(lists, inputs, strict=True)]
            return lambda: [job() for job in jobs], [t for row in outputs for t in row]

        return self._start("all_gather_coalesced", prepare, opts)

    def _gather_list(self, parts: Tensors, given: torch.Tensor, opts: Any) -> Job:
        limit, site = self._limit(opts), self._calls.sites.here()
        self._check_parts(parts, given, "the output list")
        x = source(given)
        sizes = [part.numel() for part in parts]
        flat = torch.empty(sum(sizes), dtype=given.dtype)

        def job() -> None:
            if len(set(sizes)) == 1:
                self._calls.move(Kind.ALL_GATHER, x, flat, flat.numel(), 0, site, limit)
            else:
                self._session.place = site
                self._session.all_gather_v(_bytes(x), _bytes(flat), limit)
            _deal(flat, parts)

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
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != self._size * given.numel() or given.dtype != output.dtype:
                raise ArgumentError(
                    f"the input has {given.numel()} elements of {given.dtype}, the output "
                    f"{output.numel()} of {output.dtype}; expected {self._size} times as many of "
                    "the same type"
                )
            calls.append((source(given), target(output), output))

        def job() -> None:
            for x, out, output in calls:
                self._calls.move(Kind.ALL_GATHER, x, out, out.numel(), 0, site, limit)
                store(out, output)

        return job

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give the root the tensors of all, as a list."""
        opts = c10d.GatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site, root = self._limit(opts), self._calls.sites.here(), opts.rootRank
            x = source(single(inputs, "gather"))
            count, flat, parts = self._size * x.numel(), None, []
            if self._rank == root:
                parts = single(outputs, "gather")
                self._check_parts(parts, x, "the output list", equal=True)
                flat = torch.empty(count, dtype=x.dtype)

            def job() -> None:
                self._calls.move(Kind.GATHER, x, flat, count, root, site, limit)
                if flat is not None:
                    _deal(flat, parts)

            return job, parts

        return self._start("gather", prepare, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Give rank r the r-th tensor of the root's list."""
        opts = c10d.ScatterOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site, root = self._limit(opts), self._calls.sites.here(), opts.rootRank
            output = single(outputs, "scatter")
            out, x = target(output), None
            if self._rank == root:
                parts = single(inputs, "scatter")
                self._check_parts(parts, output, "the input list", equal=True)
                x = _flat(parts)

            def job() -> None:
                count = self._size * out.numel()
                self._calls.move(Kind.SCATTER, x, out, count, root, site, limit)
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
            sent = self._block_bytes(x, input_splits, "input")
            self._block_bytes(out, output_splits, "output")

            def job() -> None:
                if even:
                    self._calls.move(Kind.ALL_TO_ALL, x, out, x.numel(), 0, site, limit)
                else:
                    self._session.place = site
                    self._session.all_to_all_v(_bytes(x), sent, _bytes(out), limit)
                store(out, output)

            return job, [output]

        return self._start("all_to_all", prepare, opts)

    alltoall_base = all_to_all_single

    def _block_bytes(self, tensor: torch.Tensor, splits: list[int], what: str) -> list[int]:
        """Return the size of the block for each rank."""
        n, rows = self._size, tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % n:
            raise ArgumentError(f"dim 0 of the {what} is {rows}, not a multiple of {n} ranks")
        splits = splits or [rows // n] * n
        if len(splits) != n or min(splits) < 0 or sum(splits) != rows:
            raise ArgumentError(
                f"{what} split sizes {splits}: expected {n} sizes that add up to {rows}"
            )
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return [row * split for split in splits]

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send tensor j to rank j. They may differ in size."""
        opts = c10d.AllToAllOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            for tensors, what in ((outputs, "output"), (inputs, "input")):
                self._check_parts(tensors, inputs[0], f"the {what} list")
            x, sent = _flat(inputs), [t.numel() * t.element_size() for t in inputs]
            out = torch.empty(sum(t.numel() for t in outputs), dtype=x.dtype)

            def job() -> None:
                self._session.place = site
                self._session.all_to_all_v(_bytes(x), sent, _bytes(out), limit)
                _deal(out, outputs)

            return job, outputs

        return self._start("all_to_all", prepare, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank has called it."""
        opts = c10d.BarrierOptions() if opts is None else opts
        limit, site = self._limit(opts), self._calls.sites.here()
        return self._start("barrier", lambda: (lambda: self._calls.barrier(site, limit), []), opts)

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
        self._now("monitored_barrier", lambda: self._calls.barrier(site, limit), [])

    def _check_parts(
        self, parts: Tensors, like: torch.Tensor, what: str, equal: bool = False
    ) -> None:
        if len(parts) != self._size:
            raise ArgumentError(f"{what} has {len(parts)} tensors for {self._size} ranks")
        for rank, part in enumerate(parts):
            if part.dtype != like.dtype:
                raise ArgumentError(f"{what}: tensor {rank} is {part.dtype}, not {like.dtype}")
            if equal and part.numel() != like.numel():
                raise ArgumentError(
                    f"{what}: tensor {rank} has {part.numel()} elements, not {like.numel()}"
                )

"""The operations that move lists of tensors: all_gather, gather, scatter, all_to_all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.runtime.calls import v_variants
from pycoll.torch.backend.core import Job
from pycoll.torch.calls.interrupts import ends_group
from pycoll.torch.calls.work import Tensors
from pycoll.torch.operations.arguments import (
    check_count,
    check_list,
    check_same_size,
    columns,
    root_of,
    single,
)
from pycoll.torch.operations.contributions import unwritten
from pycoll.torch.tensors.blocks import as_bytes, deal, pack, room
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import name_of, source, store, target
from pycoll.types import Kind


class ListMoves:
    """Mixed into a process group, beside `Moves`.

    Blocks of one size are read and written where they lie; others go through flat memory.
    """

    @ends_group
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank the tensors of all, as a list. They may differ in size."""
        opts = c10d.AllgatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            parts, given = single(outputs, "all_gather"), single(inputs, "all_gather")
            return self._gather_list(parts, self._own_block(parts, given), opts), parts

        return self._start("all_gather", prepare, opts)

    @ends_group
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `allgather` for several tensors: ``outputs[rank][i]`` is ``inputs[i]`` of a rank."""
        opts = c10d.AllgatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            lists = columns(outputs, inputs, self._size)
            rows = [parts for parts, _ in lists]
            blocks = unwritten(self._calls, [self._own_block(*pair) for pair in lists], rows)
            jobs = [self._gather_list(*pair, opts) for pair in zip(rows, blocks, strict=True)]
            whole = self._in_parts(lambda: [job() for job in jobs], len(jobs))
            return whole, [t for row in outputs for t in row]

        return self._start("all_gather_coalesced", prepare, opts)

    def _own_block(self, parts: Tensors, given: torch.Tensor) -> torch.Tensor:
        """Return the input of an all_gather in contiguous memory, and check that it fits."""
        x, own = source(given), f"tensor {self._rank} of the output list"
        check_list(parts, self._size, given, "the output list", output=True)
        check_same_size(given, "the input", parts[self._rank], f"{own}, this rank's")
        return x

    def _gather_list(self, parts: Tensors, x: torch.Tensor, opts: Any) -> Job:
        limit, site = self._limit(opts), self._calls.sites.here()
        boxes = self._boxes(Kind.ALL_GATHER, parts, x, 0)
        if boxes:
            return lambda: self._deal(Kind.ALL_GATHER, x, boxes, parts, 0, site, limit)
        sizes = [part.numel() for part in parts]
        flat = room(self._calls, x, sum(sizes))

        def job() -> None:
            if len(set(sizes)) == 1:
                self._move(Kind.ALL_GATHER, x, flat, flat.numel(), 0, site, limit)
            else:
                self._session.place = site
                self._gather_uneven(x, flat, [part.nbytes for part in parts], limit)
            deal(flat, parts)

        return job

    def _gather_uneven(
        self, x: torch.Tensor, flat: torch.Tensor, sizes: list[int], limit: float
    ) -> None:
        with on_host(x, flat) as (a, b):
            given = self._session, Kind.ALL_GATHER_V, as_bytes(a), 0, as_bytes(b), limit
            v_variants.gather(*given, expected=sizes, dtype_name=name_of(x.dtype))

    def _boxes(self, kind: Kind, parts: Tensors, x: torch.Tensor, root: int) -> Tensors | None:
        """Return what receives the blocks of a list, if they can be received one by one."""
        if not self._calls.listed.wants(x):
            return None
        boxes = [target(part) for part in parts]
        return boxes if self._calls.listed.takes(kind, boxes, x, root) else None

    def _deal(
        self, kind: Kind, x: torch.Tensor, boxes: Tensors, parts: Tensors, *args: Any
    ) -> None:
        self._calls.listed.move(kind, x, boxes, *args)
        for box, part in zip(boxes, parts, strict=True):
            store(box, part)

    @ends_group
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give the root the tensors of all, as a list."""
        opts = c10d.GatherOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            x, root = source(single(inputs, "gather")), root_of(opts, self._size)
            count, flat, parts, boxes = self._size * x.numel(), None, [], None
            if self._rank == root:
                parts = single(outputs, "gather")
                check_list(parts, self._size, x, "the output list", equal=True, output=True)
                boxes = self._boxes(Kind.GATHER, parts, x, root)
                flat = None if boxes else room(self._calls, x, count)

            def job() -> None:
                if boxes:
                    self._deal(Kind.GATHER, x, boxes, parts, root, site, limit)
                    return
                self._move(Kind.GATHER, x, flat, count, root, site, limit)
                if flat is not None:
                    deal(flat, parts)

            return job, parts if self._rank == root else inputs

        return self._start("gather", prepare, opts)

    @ends_group
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Give rank r the r-th tensor of the root's list."""
        opts = c10d.ScatterOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            limit, site = self._limit(opts), self._calls.sites.here()
            output, root = single(outputs, "scatter"), root_of(opts, self._size)
            out, x, blocks = target(output), None, None
            one_by_one = self._calls.listed.wants(out)
            if self._rank == root:
                parts = single(inputs, "scatter")
                check_list(parts, self._size, output, "the input list", equal=True)
                blocks = [source(part).to(out.device) for part in parts]
                if not one_by_one or not self._calls.listed.takes(Kind.SCATTER, blocks, out, root):
                    x = pack(self._calls, blocks)
                    blocks = list(x.chunk(self._size))

            def job() -> None:
                if one_by_one:
                    self._calls.listed.move(Kind.SCATTER, out, blocks, root, site, limit)
                else:
                    count = self._size * out.numel()
                    self._move(Kind.SCATTER, x, out, count, root, site, limit)
                store(out, output)

            return job, outputs

        return self._start("scatter", prepare, opts)

    @ends_group
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

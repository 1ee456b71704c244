"""The operations that combine tensors: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.runtime.calls import v_variants
from pycoll.torch.backend.core import Job
from pycoll.torch.calls.fast_path import usual
from pycoll.torch.calls.interrupts import ends_group
from pycoll.torch.calls.work import Tensors
from pycoll.torch.operations.arguments import (
    check_list,
    check_same_size,
    check_share,
    is_share,
    pairs,
    root_of,
    single,
    some,
)
from pycoll.torch.operations.contributions import contribution, unwritten
from pycoll.torch.operations.sparse import coalesced, is_sparse, summed
from pycoll.torch.tensors.blocks import pack
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import (
    as_reducible,
    check_output,
    name_of,
    reduction,
    source,
    store,
    target,
)
from pycoll.types import Kind, ReduceOp


class Reductions:
    """Mixed into a process group."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine a tensor in place; every rank gets the result."""
        try:
            opts = c10d.AllreduceOptions() if opts is None else opts
            key = None
            if len(tensors) == 1 and (op := usual(opts.reduceOp)) is not None:
                tensor = tensors[0]
                key = Kind.ALL_REDUCE, tensor.dtype, tensor.numel(), op, 0
                work = self._again(key, tensor, tensor, opts)
                if work is not None:
                    return work

            def prepare() -> tuple[Job, Tensors]:
                tensor = single(tensors, "all_reduce")
                if is_sparse(tensor):
                    return self._all_reduce_sparse(tensors, opts), tensors
                return self._kept(self._all_reduce(tensors, opts), key, tensor), tensors

            return self._start("all_reduce", prepare, opts)
        except BaseException as error:
            self._ended_by(error)
            raise

    @ends_group
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine several tensors in place, one after the other."""
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        return self._start(
            "all_reduce_coalesced",
            lambda: (self._all_reduce(some(tensors), opts), list(tensors)),
            opts,
        )

    def _all_reduce(self, tensors: Tensors, opts: Any) -> Job:
        how, limit, site = reduction(opts.reduceOp), self._limit(opts), self._calls.sites.here()
        boxes = [source(tensor, "the tensor") for tensor in tensors]
        for tensor in tensors:
            check_output(tensor, "the tensor")
        inputs = [contribution(self._calls, box, how) for box in boxes]
        inputs = unwritten(self._calls, inputs, [[tensor] for tensor in tensors])

        def job() -> None:
            for x, box, tensor in zip(inputs, boxes, tensors, strict=True):
                self._combine(Kind.ALL_REDUCE, x, box, how.op, 0, site, limit)
                store(box, tensor)

        return self._in_parts(job, len(tensors))

    def _all_reduce_sparse(self, tensors: Tensors, opts: Any) -> Job:
        how, limit, site = reduction(opts.reduceOp), self._limit(opts), self._calls.sites.here()
        mine = coalesced(tensors[0], how.op, how.factor)

        def gather(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((self._size, *x.shape))
            self._calls.move(Kind.ALL_GATHER, x, out, out.numel(), 0, site, limit)
            return out

        def job() -> None:
            with torch.no_grad():
                tensors[0].copy_(summed(mine, gather))

        return self._in_parts(job, 3)

    @ends_group
    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks on the root; that of the others stays as it is."""
        opts = c10d.ReduceOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            how, limit, site = reduction(opts.reduceOp), self._limit(opts), self._calls.sites.here()
            tensor, root = single(tensors, "reduce"), root_of(opts, self._size)
            box = source(tensor, "the tensor")
            if self._rank == root:
                check_output(tensor, "the tensor")
            x = contribution(self._calls, box, how)

            def job() -> None:
                out = box if self._rank == root else None
                self._combine(Kind.REDUCE, x, out, how.op, root, site, limit)
                if out is not None:
                    store(box, tensor)

            return job, tensors

        return self._start("reduce", prepare, opts)

    @ends_group
    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        """Combine lists of tensors; rank r gets the r-th. They may differ in size."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts

        def prepare() -> tuple[Job, Tensors]:
            how, limit, site = reduction(opts.reduceOp), self._limit(opts), self._calls.sites.here()
            output, parts = single(outputs, "reduce_scatter"), single(inputs, "reduce_scatter")
            check_list(parts, self._size, output, "the input list")
            own = f"tensor {self._rank} of the input list, this rank's"
            check_same_size(output, "the output", parts[self._rank], own)
            x = contribution(self._calls, pack(self._calls, parts), how)
            out = target(output)
            counts = [part.numel() for part in parts]

            def job() -> None:
                if len(set(counts)) == 1:
                    self._combine(Kind.REDUCE_SCATTER, x, out, how.op, 0, site, limit)
                else:
                    self._session.place = site
                    self._combine_uneven(x, out, counts, how.op, limit)
                store(out, output)

            return job, outputs

        return self._start("reduce_scatter", prepare, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Combine a tensor of all ranks; rank r gets its r-th block."""
        try:
            opts = c10d.ReduceScatterOptions() if opts is None else opts
            key = None
            if (op := usual(opts.reduceOp)) is not None and is_share(output, input, self._size):
                key = Kind.REDUCE_SCATTER, input.dtype, input.numel(), op, 0
                work = self._again(key, input, output, opts)
                if work is not None:
                    return work

            def prepare() -> tuple[Job, Tensors]:
                job = self._scatter_sums([output], [input], opts)
                return self._kept(job, key, input), [output]

            return self._start("reduce_scatter", prepare, opts)
        except BaseException as error:
            self._ended_by(error)
            raise

    _reduce_scatter_base = reduce_scatter_single

    @ends_group
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do `reduce_scatter_single` for several tensors."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        return self._start(
            "reduce_scatter_coalesced",
            lambda: (self._scatter_sums(outputs, inputs, opts), list(outputs)),
            opts,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Job:
        how, limit, site = reduction(opts.reduceOp), self._limit(opts), self._calls.sites.here()
        given, boxes = [], []
        for output, x in pairs(outputs, inputs):
            check_share(output, x, self._size, ("the output", "the input"))
            given.append(contribution(self._calls, source(x), how))
            boxes.append(target(output))
        given = unwritten(self._calls, given, [[output] for output in outputs])

        def job() -> None:
            for x, out, output in zip(given, boxes, outputs, strict=True):
                self._combine(Kind.REDUCE_SCATTER, x, out, how.op, 0, site, limit)
                store(out, output)

        return self._in_parts(job, len(outputs))

    def _combine(
        self,
        kind: Kind,
        x: torch.Tensor,
        out: torch.Tensor | None,
        op: ReduceOp,
        root: int,
        site: int,
        limit: float,
    ) -> None:
        self._calls_for(x, out).reduce(kind, x, out, op, root, site, limit)

    def _combine_uneven(
        self, x: torch.Tensor, out: torch.Tensor, counts: list[int], op: ReduceOp, limit: float
    ) -> None:
        with on_host(x, out) as (given, box):
            flat, _, operation = as_reducible(given, op)
            scale = flat.numel() // max(1, x.numel())
            v_variants.reduce_scatter(
                self._session,
                flat.reshape(-1),
                [scale * count for count in counts],
                operation.name.lower(),
                None,
                as_reducible(box.reshape(-1), op)[0].reshape(-1),
                limit,
                name_of(x.dtype),
            )

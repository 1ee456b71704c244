"""The operations that combine tensors: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll import _C
from pycoll.runtime import vcalls
from pycoll.torch.arguments import (
    check_list,
    check_same_size,
    check_share,
    pairs,
    root_of,
    single,
    some,
)
from pycoll.torch.contributions import contribution, unwritten
from pycoll.torch.core import Job
from pycoll.torch.devices import on_host
from pycoll.torch.lists import pack
from pycoll.torch.profiling import profiling
from pycoll.torch.sparse import coalesced, is_sparse, summed
from pycoll.torch.tensors import (
    DTYPES,
    as_reducible,
    check_output,
    name_of,
    reduction,
    source,
    store,
    target,
)
from pycoll.torch.work import Tensors, done
from pycoll.types import Kind, ReduceOp

_SUM = dist.ReduceOp.SUM
_STRIDED = torch.strided
_MAX_HOT = 1024


def _is_there(view: torch.Tensor, held: int) -> bool:
    """Whether a view lies in the memory of its storage, of so many bytes, if there is any."""
    before = view.storage_offset() * view.element_size()
    return before + view.nbytes <= held and view.data_ptr() != before


class Reductions:
    """Mixed into a process group."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine a tensor in place; every rank gets the result."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        if len(tensors) != 1:
            return self._allreduce_slow(tensors, opts)
        tensor = tensors[0]
        count = tensor.numel()
        call = self._hot.get((tensor.dtype, count))
        if (
            call is None
            or opts.asyncOp
            or not (opts.reduceOp == _SUM)  # "!=" takes longer
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or not tensor.is_contiguous()
            or (count == 1 and tensor.is_neg())  # the sign is not in the memory
            or not tensor.is_cpu
            or self._background.busy
            or self._calls.symmetric
            or profiling()
            or (held := tensor.untyped_storage().nbytes()) < tensor.nbytes  # some was freed
            or (tensor.storage_offset() and not _is_there(tensor, held))
            or not (address := tensor.data_ptr())
        ):
            return self._allreduce_slow(tensors, opts)
        site, limit = self._calls.sites.here(), self._limit(opts)
        try:
            with self._lock:
                call(address, address, site, limit)
        except _C.EngineError as failure:
            error = self._session.error(*failure.args)
            raise self._error(error, "all_reduce") from error
        return done(tensors)

    def _allreduce_slow(self, tensors: Tensors, opts: Any) -> dist.Work:
        def prepare() -> tuple[Job, Tensors]:
            tensor = single(tensors, "all_reduce")
            how = self._all_reduce_sparse if is_sparse(tensor) else self._all_reduce
            job, plain = how(tensors, opts), opts.reduceOp == _SUM and tensor.is_cpu

            def whole() -> None:
                job()
                if plain and self._calls.direct:
                    self._remember(tensor.dtype, tensor.numel())

            return whole, tensors

        return self._start("all_reduce", prepare, opts)

    def _remember(self, dtype: torch.dtype, count: int) -> None:
        """Let the next sum like this one go straight to the engine; for who holds the lock."""
        known = DTYPES.get(dtype)
        if known is not None and (dtype, count) not in self._hot and len(self._hot) < _MAX_HOT:
            call = Kind.ALL_REDUCE, int(known), known.itemsize, count, ReduceOp.SUM, 0, known
            bound = self._calls.bind(*call)
            self._hot[dtype, count] = _C.AddressCall(self._session.engine, bound)

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

        return job

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

        return job

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
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        return self._start(
            "reduce_scatter", lambda: (self._scatter_sums([output], [input], opts), [output]), opts
        )

    _reduce_scatter_base = reduce_scatter_single

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

        return job

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
            vcalls.reduce_scatter(
                self._session,
                flat.reshape(-1),
                [scale * count for count in counts],
                operation.name.lower(),
                None,
                as_reducible(box.reshape(-1), op)[0].reshape(-1),
                limit,
                name_of(x.dtype),
            )

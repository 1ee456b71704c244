"""The collectives on flat tensors, one or several in a call, and barriers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.errors import ArgumentError
from pycoll.runtime.calls.parts import v_variants
from pycoll.torch.calls.caller import Caller, Job
from pycoll.torch.errors import BackendTimeout, in_words_of_gloo
from pycoll.torch.operations.arguments import (
    are_blocks,
    block_bytes,
    check_share,
    contribution,
    is_share,
    pairs,
    root_of,
    single,
    unwritten,
)
from pycoll.torch.operations.operation import Gather, Prepared, Repeated, operation
from pycoll.torch.operations.packing import PACKED, Alone, Part, in_packs
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import (
    Request,
    Tensors,
    as_bytes,
    as_reducible,
    check_output,
    name_of,
    reduction,
    source,
    store,
    target,
)
from pycoll.types import Kind, ReduceOp

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_MAX_DIMS = 16  # of a sparse tensor


def _usual(op: dist.ReduceOp) -> ReduceOp | None:
    """Return the operation if training uses it; to recognise the others takes long."""
    return ReduceOp.SUM if op == _SUM else ReduceOp.AVG if op == _AVG else None


def _like_all_reduce(caller: Caller, args: tuple) -> Repeated:
    tensors, opts = args
    if len(tensors) != 1 or (op := _usual(opts.reduceOp)) is None:
        return None
    tensor = tensors[0]
    return (Kind.ALL_REDUCE, tensor.dtype, tensor.numel(), op, 0), tensor, tensor


def _like_broadcast(caller: Caller, args: tuple) -> Repeated:
    tensors, opts = args
    if len(tensors) != 1:
        return None
    tensor, root = tensors[0], opts.rootRank
    given = tensor if caller.rank == root else None
    return (Kind.BROADCAST, tensor.dtype, tensor.numel(), None, root), given, tensor


def _like_reduce_scatter(caller: Caller, args: tuple) -> Repeated:
    out, x, opts = args
    if (op := _usual(opts.reduceOp)) is None or not is_share(out, x, caller.size):
        return None
    return (Kind.REDUCE_SCATTER, x.dtype, x.numel(), op, 0), x, out


def _like_all_gather(caller: Caller, args: tuple) -> Repeated:
    out, x, _ = args
    if not is_share(x, out, caller.size):
        return None
    return (Kind.ALL_GATHER, out.dtype, out.numel(), None, 0), x, out


def _like_all_to_all(caller: Caller, args: tuple) -> Repeated:
    out, x, out_splits, x_splits, _ = args
    if out_splits or x_splits or not are_blocks(out, x, caller.size):
        return None
    return (Kind.ALL_TO_ALL, x.dtype, x.numel(), None, 0), x, out


class Collectives:
    """Mixed into a process group."""

    _caller: Caller

    def _job(self, request: Request, parts: Iterable[Part]) -> Job:
        """Return a job that makes a call for each part, or for several, and stores the output."""
        where = self._caller.calls.symmetric_memory  # whose tensors are moved where they lie
        pack = where is None and request.kind in PACKED
        calls = (
            in_packs(request.kind, self._caller.size, parts) if pack else list(map(Alone, parts))
        )

        def job() -> None:
            for call in calls:
                x, out = call.ends()
                self._caller.run(request, x, out)
                call.finish(out)

        return self._caller.in_parts(job, len(calls))

    def _pairs_job(self, kind: Kind, outputs: Tensors, inputs: Tensors, opts: Any) -> Job:
        """Return the job of all_reduces, reduce_scatters or all_gathers, one for each pair."""
        memory, n, given, buffers = self._caller.calls.symmetric_memory, self._caller.size, [], []
        how = None if kind == Kind.ALL_GATHER else reduction(opts.reduceOp)
        for output, tensor in pairs(outputs, inputs):
            if kind == Kind.ALL_REDUCE:
                x = buffer = source(tensor, "the tensor")
                check_output(tensor, "the tensor")
            else:
                if kind == Kind.ALL_GATHER:
                    check_share(tensor, output, n, ("the input", "the output"))
                else:
                    check_share(output, tensor, n, ("the output", "the input"))
                x, buffer = source(tensor), target(output)
            given.append(x if how is None else contribution(x, how, memory))
            buffers.append(buffer)
        given = unwritten(given, [[output] for output in outputs], memory)
        request = self._caller.request(kind, opts, None if how is None else how.op)
        return self._job(request, zip(given, buffers, outputs, strict=True))

    @operation("all_reduce", c10d.AllreduceOptions, _like_all_reduce)
    def allreduce(self, tensors: Tensors, opts: Any) -> Prepared:
        """Combine a tensor in place; every rank gets the result."""
        if is_sparse(single(tensors, "all_reduce")):
            return self._all_reduce_sparse(tensors[0], opts), tensors
        return self._pairs_job(Kind.ALL_REDUCE, tensors, tensors, opts), tensors

    @operation("all_reduce_coalesced", c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Prepared:
        """Combine several tensors in place, one after the other."""
        return self._pairs_job(Kind.ALL_REDUCE, tensors, tensors, opts), list(tensors)

    def _all_reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Job:
        how, request = reduction(opts.reduceOp), self._caller.request(Kind.ALL_GATHER, opts)
        mine = coalesced(tensor, how.op, how.factor)

        def gather(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((self._caller.size, *x.shape))
            self._caller.calls.run(request, x, out)
            return out

        def job() -> None:
            with torch.no_grad():
                tensor.copy_(summed(mine, gather))

        return self._caller.in_parts(job, 3)

    @operation("reduce", c10d.ReduceOptions)
    def reduce(self, tensors: Tensors, opts: Any) -> Prepared:
        """Combine a tensor of all ranks on the root; that of the others stays as it is."""
        how, tensor = reduction(opts.reduceOp), single(tensors, "reduce")
        root = root_of(opts, self._caller.size)
        buffer = source(tensor, "the tensor")
        if self._caller.rank == root:
            check_output(tensor, "the tensor")
        x = contribution(buffer, how, self._caller.calls.symmetric_memory)
        ends = (buffer, tensor) if self._caller.rank == root else (None, None)
        request = self._caller.request(Kind.REDUCE, opts, how.op, root)
        return self._job(request, [(x, *ends)]), tensors

    @operation("broadcast", c10d.BroadcastOptions, _like_broadcast)
    def broadcast(self, tensors: Tensors, opts: Any) -> Prepared:
        """Give every rank the root's tensor."""
        tensor, root = single(tensors, "broadcast"), root_of(opts, self._caller.size)
        buffer = source(tensor, "the tensor")
        request = self._caller.request(Kind.BROADCAST, opts, None, root)
        if self._caller.rank == root:
            return self._job(request, [(buffer, buffer, None)]), tensors
        check_output(tensor, "the tensor")
        return self._job(request, [(None, buffer, tensor)]), tensors

    @operation("reduce_scatter", c10d.ReduceScatterOptions, _like_reduce_scatter)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> Prepared:
        """Combine a tensor of all ranks; rank r gets its r-th block."""
        return self._pairs_job(Kind.REDUCE_SCATTER, [output], [input], opts), [output]

    @operation("reduce_scatter_coalesced", c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Prepared:
        """Do `reduce_scatter_single` for several tensors."""
        return self._pairs_job(Kind.REDUCE_SCATTER, outputs, inputs, opts), list(outputs)

    @operation("all_gather", c10d.AllgatherOptions, _like_all_gather)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Prepared:
        """Give every rank the tensors of all, one behind the other."""
        return self._pairs_job(Kind.ALL_GATHER, [output], [input], opts), [output]

    @operation("all_gather_coalesced", c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Prepared:
        """Do `all_gather_single` for several tensors."""
        return self._pairs_job(Kind.ALL_GATHER, outputs, inputs, opts), list(outputs)

    @operation("all_to_all", c10d.AllToAllOptions, _like_all_to_all)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> Prepared:
        """Send block j to rank j; blocks are equal, or have the given lengths along dim 0."""
        request, n = self._caller.request(Kind.ALL_TO_ALL, opts), self._caller.size
        x, out = source(input), target(output)
        sent = block_bytes(x, input_splits, n, "input")
        received = block_bytes(out, output_splits, n, "output")
        self._check_own_block(x, out, sent, received)
        if not output_splits and not input_splits:
            return self._job(request, [(x, out, output)]), [output]

        def job() -> None:
            self._exchange(request, x, sent, out, received)
            store(out, output)

        return job, [output]

    # C++ and older versions of PyTorch use these names.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def _exchange(
        self,
        request: Request,
        x: torch.Tensor,
        sent: list[int],
        out: torch.Tensor,
        received: list[int],
    ) -> None:
        """Send blocks of different sizes, given in bytes."""
        session, dtype = self._caller.session, name_of(x.dtype)
        session.call_site = request.site
        with on_host(x, out) as (a, b):
            given = as_bytes(a), sent, as_bytes(b), request.timeout_s, received, dtype
            v_variants.all_to_all(session, *given)

    def _check_own_block(
        self, x: torch.Tensor, out: torch.Tensor, sent: list[int], received: list[int]
    ) -> None:
        own = self._caller.rank
        if x.dtype != out.dtype or sent[own] != received[own]:
            raise ArgumentError(
                f"the output has {out.numel()} elements of {out.dtype}, the input {x.numel()} of "
                f"{x.dtype}; block {own}, from this rank to itself, has {sent[own]} bytes in the "
                f"input and {received[own]} in the output; expected the same size and type"
            )

    @operation("barrier", c10d.BarrierOptions)
    def barrier(self, opts: Any) -> Prepared:
        """Wait until every rank has called it."""
        return self._barrier(self._caller.limit(opts)), []

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has called it; if not all do, rank 0 says which, as gloo's does.

        Only rank 0 gives up after `timeout`; the others hear of it, or give up after the group's.

        Args:
            timeout: By default the group's.
            wait_all_ranks: Whether rank 0 names all ranks that are missing, or the first.

        Raises:
            BackendTimeout: In gloo's words, followed by what each rank is doing.
        """
        caller = self._caller
        limit = caller.timeout_s if timeout is None else timeout.total_seconds()
        waits = max(limit, caller.timeout_s) if caller.rank else limit
        try:
            caller.run_now("monitored_barrier", self._barrier(waits), [])
        except BackendTimeout as error:
            raise in_words_of_gloo(error, caller.rank, limit, wait_all_ranks) from error
        except BaseException as error:
            caller.abort_if_interrupted(error)
            raise

    def _barrier(self, limit: float) -> Job:
        site = self._caller.calls.sites.here()

        def job() -> None:
            self._caller.devices.drain()
            self._caller.calls.barrier(site, limit)

        return job


# --- Sums of sparse tensors, as DDP makes them of gradients of `nn.Embedding(sparse=True)`


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether `summed` takes a tensor."""
    return tensor.layout is torch.sparse_coo and tensor.is_cpu


def coalesced(tensor: torch.Tensor, op: ReduceOp, factor: object) -> torch.Tensor:
    """Return this rank's elements, each index once; refuse what cannot be summed."""
    if op is not ReduceOp.SUM or factor is not None:
        raise ArgumentError("sparse tensors can only be combined with SUM; reduce x.to_dense()")
    if tensor._is_view() and tensor._base.is_complex():
        raise ArgumentError(
            "the sparse tensor is complex; PyTorch passes on a copy that is real, so the result "
            "would be lost: reduce x.to_dense()"
        )
    if tensor.dim() > _MAX_DIMS:
        raise ArgumentError(f"a sparse tensor has {tensor.dim()} dims; accepted: {_MAX_DIMS}")
    mine = tensor.detach().coalesce()
    as_reducible(mine.values(), op)
    return mine


def summed(mine: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Return the sum of `coalesced` tensors, the same bits on each rank.

    `gather` exchanges contiguous tensors of one size. If shapes differ, all ranks raise.
    """
    form = [mine.sparse_dim(), *mine.shape]
    facts = [mine._nnz(), *form, *[-1] * (_MAX_DIMS + 1 - len(form))]
    counts, *forms = gather(torch.tensor(facts)).t().tolist()
    first, *others = zip(*forms, strict=True)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:  # the same pair on all ranks, so that they raise the same text
            raise ArgumentError(
                f"rank 0 has {_described(first)}, rank {rank} {_described(theirs)}; expected the "
                "same on all"
            )
    places = _gathered(mine.indices().t(), counts, gather)
    values = _gathered(mine.values(), counts, gather)
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # rounded once
    whole = torch.sparse_coo_tensor(places.t(), values, mine.shape, check_invariants=False)
    return whole.coalesce().to(mine.dtype)


def _described(facts: tuple[int, ...]) -> str:
    sparse, *shape = (k for k in facts if k >= 0)
    return f"a sparse tensor of shape {shape} with {sparse} sparse dims"


def _gathered(rows: torch.Tensor, counts: list[int], gather: Gather) -> torch.Tensor:
    """Return the rows of all ranks, one behind the other."""
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    return torch.cat([part[:k] for part, k in zip(gather(padded), counts, strict=True)])

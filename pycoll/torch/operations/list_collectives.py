"""The collectives on lists of tensors: all_gather, gather, scatter, reduce_scatter, all_to_all."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from pycoll.runtime.calls.parts import v_variants
from pycoll.torch.calls.caller import Job
from pycoll.torch.operations.arguments import (
    check_count,
    check_list,
    check_same_size,
    columns,
    contribution,
    root_of,
    single,
    unwritten,
)
from pycoll.torch.operations.collectives import Collectives
from pycoll.torch.operations.operation import Prepared, operation
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import (
    Request,
    Tensors,
    as_bytes,
    as_reducible,
    name_of,
    reduction,
    source,
    store,
    target,
    unpack,
)
from pycoll.types import Kind


class ListCollectives(Collectives):
    """Mixed into a process group.

    Blocks of one size are read and written in place; others are copied through a flat buffer.
    """

    @operation("reduce_scatter", c10d.ReduceScatterOptions)
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Prepared:
        """Combine lists of tensors; rank r gets the r-th. They may differ in size."""
        caller, how = self._caller, reduction(opts.reduceOp)
        output, parts = single(outputs, "reduce_scatter"), single(inputs, "reduce_scatter")
        check_list(parts, caller.size, output, "the input list")
        own = f"tensor {caller.rank} of the input list, this rank's"
        check_same_size(output, "the output", parts[caller.rank], own)
        x = contribution(caller.calls.pack(parts), how, caller.calls.symmetric_memory)
        out, counts = target(output), [part.numel() for part in parts]
        request = caller.request(Kind.REDUCE_SCATTER, opts, how.op)
        if len(set(counts)) == 1:
            return self._job(request, [(x, out, output)]), outputs

        def job() -> None:
            self._reduce_scatter_uneven(request, x, out, counts)
            store(out, output)

        return job, outputs

    def _reduce_scatter_uneven(
        self, request: Request, x: torch.Tensor, out: torch.Tensor, counts: list[int]
    ) -> None:
        self._caller.session.call_site = request.site
        with on_host(x, out) as (given, buffer):
            flat, _, op = as_reducible(given, request.op)
            scale = flat.numel() // max(1, x.numel())
            v_variants.reduce_scatter(
                self._caller.session,
                flat.reshape(-1),
                [scale * count for count in counts],
                op.name.lower(),
                self._caller.calls.order,
                as_reducible(buffer.reshape(-1), request.op)[0].reshape(-1),
                request.timeout_s,
                name_of(x.dtype),
            )

    @operation("all_gather", c10d.AllgatherOptions)
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Prepared:
        """Give every rank the tensors of all, as a list. They may differ in size."""
        parts, given = single(outputs, "all_gather"), single(inputs, "all_gather")
        return self._gather_list(parts, self._own_block(parts, given), opts), parts

    @operation("all_gather_coalesced", c10d.AllgatherOptions)
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Prepared:
        """Do `allgather` for several tensors: ``outputs[rank][i]`` is ``inputs[i]`` of a rank."""
        lists = columns(outputs, inputs, self._caller.size)
        rows = [parts for parts, _ in lists]
        own = [self._own_block(*pair) for pair in lists]
        blocks = unwritten(own, rows, self._caller.calls.symmetric_memory)
        jobs = [self._gather_list(*pair, opts) for pair in zip(rows, blocks, strict=True)]
        whole = self._caller.in_parts(lambda: [job() for job in jobs], len(jobs))
        return whole, [t for row in outputs for t in row]

    def _own_block(self, parts: Tensors, given: torch.Tensor) -> torch.Tensor:
        """Return the input of an all_gather in contiguous memory, and check that it fits."""
        x, rank = source(given), self._caller.rank
        check_list(parts, self._caller.size, given, "the output list", output=True)
        own = f"tensor {rank} of the output list, this rank's"
        check_same_size(given, "the input", parts[rank], own)
        return x

    def _gather_list(self, parts: Tensors, x: torch.Tensor, opts: Any) -> Job:
        request = self._caller.request(Kind.ALL_GATHER, opts)
        buffers = self._buffers(request, parts, x)
        if buffers:
            return lambda: self._gather_in_place(request, x, buffers, parts)
        sizes = [part.numel() for part in parts]
        flat = self._caller.calls.empty(x, sum(sizes))

        def job() -> None:
            if len(set(sizes)) == 1:
                self._caller.run(request, x, flat)
            else:
                self._gather_uneven(request, x, flat, [part.nbytes for part in parts])
            unpack(flat, parts)

        return job

    def _gather_uneven(
        self, request: Request, x: torch.Tensor, flat: torch.Tensor, sizes: list[int]
    ) -> None:
        session, limit = self._caller.session, request.timeout_s
        session.call_site = request.site
        with on_host(x, flat) as (a, b):
            given = session, Kind.ALL_GATHER_V, as_bytes(a), 0, as_bytes(b), limit
            v_variants.gather(*given, expected=sizes, dtype_name=name_of(x.dtype))

    def _buffers(self, request: Request, parts: Tensors, x: torch.Tensor) -> Tensors | None:
        """Return what receives the blocks of a list, if they can be received one by one."""
        lists = self._caller.lists
        if not lists.wants(x):
            return None
        buffers = [target(part) for part in parts]
        return buffers if lists.takes(request.kind, buffers, x, request.root) else None

    def _gather_in_place(
        self, request: Request, x: torch.Tensor, buffers: Tensors, parts: Tensors
    ) -> None:
        self._caller.lists.run(request, x, buffers)
        for buffer, part in zip(buffers, parts, strict=True):
            store(buffer, part)

    @operation("gather", c10d.GatherOptions)
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Prepared:
        """Give the root the tensors of all, as a list."""
        caller, x = self._caller, source(single(inputs, "gather"))
        request = caller.request(Kind.GATHER, opts, None, root_of(opts, caller.size))
        if caller.rank != request.root:
            return self._job(request, [(x, None, None)]), inputs
        parts = single(outputs, "gather")
        check_list(parts, caller.size, x, "the output list", equal=True, output=True)
        if buffers := self._buffers(request, parts, x):
            return lambda: self._gather_in_place(request, x, buffers, parts), parts
        flat = caller.calls.empty(x, caller.size * x.numel())

        def job() -> None:
            caller.run(request, x, flat)
            unpack(flat, parts)

        return job, parts

    @operation("scatter", c10d.ScatterOptions)
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Prepared:
        """Give rank r the r-th tensor of the root's list."""
        caller, output = self._caller, single(outputs, "scatter")
        request = caller.request(Kind.SCATTER, opts, None, root_of(opts, caller.size))
        out, x, blocks = target(output), None, None
        in_place = caller.lists.wants(out)
        if caller.rank == request.root:
            parts = single(inputs, "scatter")
            check_list(parts, caller.size, output, "the input list", equal=True)
            blocks = [source(part).to(out.device) for part in parts]
            if not in_place or not caller.lists.takes(Kind.SCATTER, blocks, out, request.root):
                x = caller.calls.pack(blocks)
                blocks = list(x.chunk(caller.size))
        if not in_place:
            return self._job(request, [(x, out, output)]), outputs

        def job() -> None:
            caller.lists.run(request, out, blocks)
            store(out, output)

        return job, outputs

    @operation("all_to_all", c10d.AllToAllOptions)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Prepared:
        """Send tensor j to rank j. They may differ in size."""
        n, rank = self._caller.size, self._caller.rank
        request = self._caller.request(Kind.ALL_TO_ALL, opts)
        check_count(inputs, n, "the input list")
        check_list(outputs, n, inputs[0], "the output list", output=True)
        check_list(inputs, n, inputs[0], "the input list")
        names = [f"tensor {rank} of the {what} list" for what in ("output", "input")]
        check_same_size(outputs[rank], names[0], inputs[rank], names[1])
        sent, received = [t.nbytes for t in inputs], [t.nbytes for t in outputs]

        def job() -> None:
            x = self._caller.calls.pack(inputs)
            out = self._caller.calls.empty(x, sum(t.numel() for t in outputs))
            self._exchange(request, x, sent, out, received)
            unpack(out, outputs)

        return job, outputs

"""Collectives whose blocks are rows that differ in number from rank to rank; results are new.

Where every rank knows all numbers of rows, nothing is exchanged besides the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d

from pycoll import _C
from pycoll.errors import ArgumentError
from pycoll.runtime.calls.parts import v_variants
from pycoll.runtime.calls.prepared import Prepared
from pycoll.torch.operations.arguments import contribution
from pycoll.torch.operations.collectives import Collectives
from pycoll.torch.tensors.devices import on_host
from pycoll.torch.tensors.layout import (
    Reduction,
    Request,
    as_bytes,
    as_reducible,
    name_of,
    source,
    target,
)
from pycoll.types import Kind, ReduceOp

_MAX_TABLES = 16
Rows = Sequence[int]
Make = Callable[[], Any]
"""Runs a checked call, with the group's lock held, and returns its result."""
Use = Callable[[np.ndarray], torch.Tensor]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of rows as bytes, ``[rows, bytes of a row]``."""
    return as_bytes(x).view(x.shape[0], math.prod(x.shape[1:]) * x.element_size())


def _checked(x: torch.Tensor) -> torch.Tensor:
    """Return an input of rows in contiguous memory."""
    if not x.dim() or not math.prod(x.shape[1:]):
        raise ArgumentError(f"x has shape {list(x.shape)}; its first dimension counts rows")
    return source(x, "x")


def _count(sizes: Rows, n: int) -> list[int]:
    try:
        counts = [int(k) for k in sizes]
    except (TypeError, ValueError):
        counts = []
    if len(counts) != n or min(counts) < 0:
        raise ArgumentError(f"sizes={sizes!r}; accepted are {n} numbers of rows, one of each rank")
    return counts


class RaggedCollectives(Collectives):
    """Mixed into a process group.

    ``sizes`` are the rows of each rank, ``[world_size]``, the same on all of them; ``timeout`` is
    in seconds. Ranks that are given other sizes get `MismatchError`'s text, or, if the input does
    not fit them, an error that names the rank.
    """

    _tables: dict[tuple, _C.BoundCall]  # exchanges made before, by their types and sizes
    _shown: list[Any] | None = None  # what peers may still read, see `show_made`

    def all_gatherv(
        self, x: torch.Tensor, sizes: Rows | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the rows of all ranks, by rank; without `sizes` their numbers are exchanged."""

        def prepare(opts: Any) -> Make:
            given, n = _checked(x), self._caller.size
            request = self._caller.request(Kind.ALL_GATHER, opts)
            known = None if sizes is None else _count(sizes, n)
            if known is not None and known[self._caller.rank] != x.shape[0]:
                raise ArgumentError(
                    f"x has {x.shape[0]} rows, but sizes={known} say {known[self._caller.rank]}"
                )
            if known is not None and len(set(known)) == 1:
                return lambda: self._gather_equal(request, given)
            return lambda: self._gather_rows(request, given, known)

        return self._make("all_gatherv", prepare, timeout)

    def _gather_equal(self, request: Request, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self._caller.size * x.shape[0], *x.shape[1:]))
        self._caller.run(request, x, out)
        return out

    def _gather_rows(
        self, request: Request, x: torch.Tensor, known: list[int] | None
    ) -> torch.Tensor:
        self._caller.session.call_site = request.site
        given = Kind.ALL_GATHER_V, rows_of(x.cpu()), 0, None, request.timeout_s
        kept = {"dtype_name": name_of(x.dtype), "known": known}
        rows = v_variants.gather(self._caller.session, *given, **kept)
        return _typed(rows, x)

    def gather_made(self, what: str, make: Make) -> torch.Tensor:
        """Return what `make` makes on each rank, rows of one shape, by rank.

        If it raises on a rank, all ranks raise, and the group stays usable.
        """

        def prepare(opts: Any) -> Make:
            row = make()
            request = self._caller.request(Kind.ALL_GATHER, opts)
            return lambda: self._gather_equal(request, row)

        return self._make(what, prepare, None)

    def all_to_allv(
        self,
        x: torch.Tensor,
        sizes: Rows | Sequence[Rows],
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Send rows to every rank, and return those from each, by rank.

        Args:
            x: The rows for rank 0, then those for rank 1, and so on.
            sizes: How many go to each rank, ``[world_size]``, which the ranks exchange; or how many
                go from each rank to each, ``[world_size, world_size]``, the same on all ranks.
            timeout: See the class.
        """

        def prepare(opts: Any) -> Make:
            given = _checked(x)
            request = self._caller.request(Kind.ALL_TO_ALL, opts)
            known = len(sizes) > 0 and not isinstance(sizes[0], int)
            return lambda: self._exchange_rows(request, given, sizes, known)

        return self._make("all_to_allv", prepare, timeout)

    def show_made(
        self, what: str, make: Callable[[], tuple[torch.Tensor, Any]], use: Use
    ) -> torch.Tensor:
        """Let every rank read what each rank has put into symmetric memory.

        Args:
            what: The name of the call, for errors.
            make: Returns a row of numbers for the other ranks, of one length, and what has to
                stay until they have used it. If it raises, see `gather_made`.
            use: Gets the rows of all ranks, ``[world_size, ...]``, and returns the result. Until it
                has returned on all ranks, what they show stays.

        The ranks meet but once, before they read. That all of them have read is known when they
        meet for the next such call: only then what this rank showed is given up. If they do not
        meet it stays, for some may have met.
        """

        def whole() -> torch.Tensor:
            request = self._caller.request(Kind.ALL_GATHER, opts)
            self._caller.session.call_site = request.site
            row, own = make()
            if self._shown is None:
                self._shown = self._caller.session.memory.shown()
            self._shown.append(own)
            table = self._gather_equal(request, row).numpy()
            del self._shown[:-1]
            return use(table)

        opts = c10d.AllgatherOptions()
        return self._make(what, lambda _: whole, None)

    @property
    def heap(self) -> _C.Heap | None:
        """The symmetric memory of all ranks, which `show_made` is for, if they share a host."""
        return self._caller.session.memory.heap if self._caller.calls.direct else None

    def block(self, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` of memory that all ranks can reach, for `show_made`."""
        return self._caller.session.memory.empty(nbytes, np.uint8)

    def exchange_made(self, what: str, make: Make, sent: np.ndarray) -> torch.Tensor:
        """Do `all_to_allv` with what `make` makes; if it raises, see `gather_made`.

        `sent` are the rows from each rank to each, contiguous uint64, as all ranks have them.
        """

        def prepare(opts: Any) -> Make:
            x = _checked(make())
            if x.shape[0] != sent[self._caller.rank].sum():
                raise ArgumentError(f"{x.shape[0]} rows, expected {sent[self._caller.rank].sum()}")
            request = self._caller.request(Kind.ALL_TO_ALL, opts)
            return lambda: self._exchange_bound(request, x, sent)

        return self._make(what, prepare, None)

    def _exchange_bound(self, request: Request, x: torch.Tensor, sent: np.ndarray) -> torch.Tensor:
        session = self._caller.session
        session.call_site = request.site
        given = x.cpu()
        out = given.new_empty((int(sent[:, session.rank].sum()), *x.shape[1:]))
        key = x.dtype, x.shape[1:], sent.tobytes()
        bound = self._tables.get(key)
        if bound is None:
            rows, name = rows_of(given), name_of(x.dtype)
            bound = session.refusing(lambda: v_variants.bind_exchange(session, rows, sent, name))
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[key] = bound
        pointers = given.data_ptr(), out.data_ptr()
        session.start(Prepared(bound, *pointers, None, (given, out)), request.timeout_s, False)
        return out.to(x.device)

    def _exchange_rows(
        self, request: Request, x: torch.Tensor, sizes: Any, known: bool
    ) -> torch.Tensor:
        self._caller.session.call_site = request.site
        given = rows_of(x.cpu()), sizes, None, request.timeout_s
        kept = {"dtype_name": name_of(x.dtype), "known": known}
        return _typed(v_variants.all_to_all(self._caller.session, *given, **kept), x)

    def reduce_scatterv(
        self,
        x: torch.Tensor,
        sizes: Rows | None = None,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Combine tensors; rank r gets the next ``sizes[r]`` rows, by default an equal share."""

        def prepare(opts: Any) -> Make:
            given, n = _checked(x), self._caller.size
            request = self._caller.request(Kind.REDUCE_SCATTER, opts, op)
            if sizes is None and x.shape[0] % n:
                raise ArgumentError(f"x has {x.shape[0]} rows, not a multiple of {n}; pass sizes")
            counts = [x.shape[0] // n] * n if sizes is None else _count(sizes, n)
            if sum(counts) != x.shape[0]:
                raise ArgumentError(f"sizes={counts} add up to {sum(counts)}, x has {x.shape[0]}")
            memory = self._caller.calls.symmetric_memory
            given = contribution(given, Reduction(op), memory)
            out = given.new_empty((counts[self._caller.rank], *x.shape[1:]))
            if len(set(counts)) == 1:
                return lambda: self._caller.run(request, given, out) or out
            return lambda: self._scatter_rows(request, given, counts, out)

        return self._make("reduce_scatterv", prepare, timeout)

    def _scatter_rows(
        self, request: Request, x: torch.Tensor, counts: list[int], out: torch.Tensor
    ) -> torch.Tensor:
        self._caller.session.call_site = request.site
        with on_host(x, out) as (a, b):
            flat, _, op = as_reducible(a, request.op)
            received = as_reducible(target(b), request.op)[0]
            arguments = flat, counts, op.name.lower(), self._caller.calls.order, received
            kept = {"dtype_name": name_of(x.dtype), "known": True}
            v_variants.reduce_scatter(self._caller.session, *arguments, request.timeout_s, **kept)
        return out

    def _make(self, what: str, prepare: Callable[[Any], Make], timeout: float | None) -> Any:
        """Check and make a synchronous call and return its result."""
        opts = c10d.AllgatherOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timedelta(seconds=timeout)
        made: list[Any] = []

        def first() -> tuple[Callable[[], None], list[torch.Tensor]]:
            make = prepare(opts)
            return lambda: made.append(make()), []

        try:
            self._caller.start(what, first, opts)
        except BaseException as error:
            self._caller.abort_if_interrupted(error)
            raise
        return made[0]


def _typed(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return received bytes as rows like those of x."""
    return rows.view(-1).view(x.dtype).view(rows.shape[0], *x.shape[1:]).to(x.device)

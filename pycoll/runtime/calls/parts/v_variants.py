"""The v-variants: collectives whose blocks differ in size from rank to rank.

The sizes are exchanged first, with an all-gather of a few integers: some must be equal on all
ranks, the others are not known elsewhere. Then every rank has the same table of offsets and lengths
and runs an ordinary plan over it. Types are compared with the sizes, also of what comes as bytes.

Where every rank knows all sizes (`known`), nothing is exchanged: a checksum of them is a part of
the call, which the engine compares.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll import _C, algorithms
from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import (
    ArrayView,
    as_reducible,
    check_output,
    new_like,
    on_device,
    view,
)
from pycoll.runtime.arrays.layouts import ChunkLayout
from pycoll.runtime.arrays.ragged_blocks import (
    check_counts,
    check_matrix,
    exchanged,
    gathered,
    scattered,
)
from pycoll.runtime.calls.functions import own_op
from pycoll.runtime.calls.parts.exchange import exchange, in_parts
from pycoll.runtime.calls.parts.repeated import Sized, Told, again, remember
from pycoll.runtime.calls.parts.said_sizes import check_counts_equal, row_of, sizes_in
from pycoll.runtime.calls.prepared import CallRequest, Prepared, table_spec
from pycoll.runtime.sessions.session import Session
from pycoll.types import Kind

_KEPT_TABLES, _KEPT_BYTES = 64, 64 << 10  # bindings for each kind of call, and of a table
_KEPT_OF_MANY = 8  # of tables of more than 4 KiB


def _asked(
    session: Session, request: CallRequest, timeout: float | None
) -> tuple[CallRequest, float]:
    """Check what does not depend on the arrays; return it in plain numbers, and the time limit."""
    root, limit = session.refusing(lambda: session.check(request, timeout))
    return request if root is request.root else request._replace(root=root), limit


def _rows(
    where: Any, x: Any, dtype_name: str | None = None
) -> tuple[ArrayView, int, int, tuple[int, ...]]:
    """Return a view, the number of rows, elements per row, and the shape of a row.

    ``dtype_name`` is the name of the type that the caller has, if it is not that of the array.
    """
    given = where.view(x, "x")
    given = given if dtype_name is None else given._replace(name=dtype_name)
    shape = given.array.shape
    if not shape:
        raise ArgumentError("x is 0-dimensional; a v-variant divides its first dimension")
    return given, shape[0], math.prod(shape[1:]), shape[1:]


def _seal(counts: np.ndarray, width: int) -> int:
    """Return a checksum, not 0, of sizes that every rank knows; the engine compares it."""
    return zlib.crc32(counts.tobytes(), width & 0xFFFFFFFF) | 1


def _check_own(counts: np.ndarray, rank: int, rows: int) -> None:
    if counts[rank] != rows:
        raise ArgumentError(
            f"x has {rows} rows, but counts[{rank}], this rank's, is {counts[rank]}"
        )


def _output(
    where: Any, given: ArrayView, shape: tuple[int, ...], out: Any
) -> tuple[Any, ArrayView]:
    result = where.new_like(given, shape) if out is None else out
    target = where.view(result, "out")
    check_output(target, shape, given)
    return result, target


def _no_output(out: Any, root: int, has_out: bool) -> None:
    if out is not None and not has_out:
        raise ArgumentError(f"out is for the root, rank {root}, only")


def _bound(
    session: Session,
    request: CallRequest,
    name: str,
    typed: ArrayView,
    lengths: np.ndarray,
    extents: Callable[[np.ndarray], ChunkLayout],
    agreed: int = 0,
) -> _C.BoundCall:
    """Bind a call to a table of lengths; quick for one of the last few."""
    asked = request.kind, request.op, request.order, request.root
    tables = session.kept.setdefault(
        (*asked, typed.code, typed.caller_code, typed.array.itemsize), {}
    )
    key = agreed, lengths.tobytes()
    found = tables.get(key)
    if found is None:
        n = session.world_size
        where = extents(np.broadcast_to(lengths, (n, n)))
        algorithm = algorithms.find(request.collective, name)
        found = session.bind(table_spec(request, algorithm, typed, where, agreed), where)
        nbytes = n * n * lengths.itemsize
        if len(tables) >= (_KEPT_TABLES if nbytes <= _KEPT_BYTES >> 4 else _KEPT_OF_MANY):
            tables.clear()
        if nbytes <= _KEPT_BYTES:
            tables[key] = found
    return found


class HostRows:
    """What a v-variant does with arrays in host memory."""

    view: Callable[..., ArrayView] = staticmethod(view)
    new_like: Callable[..., Any] = staticmethod(new_like)

    @staticmethod
    def apart(source: ArrayView, target: ArrayView | None) -> ArrayView:
        """Return a contiguous source that shares no memory with the target."""
        array = np.ascontiguousarray(source.array)
        if target is not None and np.may_share_memory(array, target.array):
            array = array.copy()
        return source._replace(array=array)

    def run(
        self,
        session: Session,
        call: tuple[CallRequest, str],
        source: ArrayView,
        target: ArrayView | None,
        blocks: tuple[np.ndarray, Callable[[np.ndarray], ChunkLayout], int],
        result: Any,
        limit: float,
        like: tuple[Sized, Told] | None = None,
    ) -> Any:
        """Run a call.

        `call` is what was asked for and the algorithm; `blocks` are lengths, what makes a table of
        them, and the checksum of sizes that were not exchanged. Calls like `like` go without Python
        code from then on.
        """

        def prepare() -> Prepared:
            given = self.apart(source, target)
            binding = _bound(session, *call, source, *blocks)
            pointers = [v.pointer if v is not None else 0 for v in (given, target)]
            parts = [v and session.memory.registered(v) for v in (given, target)]
            held = tuple(part for part in parts if part is not None)
            return Prepared(binding, *pointers, result, (given, target), registered=held)

        prepared = session.refusing(prepare)
        found = session.start(prepared, limit, False)
        if like is not None:
            remember(session, *like, prepared)
        return found


_HOST = HostRows()


def _arrays(session: Session, *given: Any) -> Any:
    """Return what knows arrays of this kind: of one in host memory, or on a device."""

    def look() -> Any:
        there = any(map(on_device, given))
        return session.device_side(*given).rows() if there else _HOST

    return session.refusing(look)


def _check_expected(rows: list[int], expected: Sequence[int] | None) -> None:
    if expected is not None and rows != list(expected):
        raise ArgumentError(f"the ranks send {rows} rows to this one, which expects {expected}")


def _like(call: Sized, row: bytes, said: bytes, *arrays: ArrayView | None) -> tuple[Sized, Told]:
    """Return what makes calls like this one quick: what was said, and where its arrays lie.

    The counts are those that were said: another thread may have changed the caller's list.
    """
    source, target = (0 if array is None else array.pointer for array in arrays)
    counts = np.frombuffer(row, np.uint64)[2:].tolist() if len(call.counts) else ()
    return call._replace(counts=counts), Told(row, said, (source, target))


@in_parts
def gather(
    session: Session,
    kind: Kind,
    x: Any,
    root: int,
    out: Any,
    timeout: float | None,
    expected: Sequence[int] | None = None,
    dtype_name: str | None = None,
    known: Sequence[int] | None = None,
    counted: bool = False,
) -> Any:
    """Concatenate blocks of different sizes, on every rank or on the root.

    ``expected`` are the rows that this rank expects of each, if it knows them; see `_rows`. With
    ``known``, the rows of each rank, which all ranks know, nothing is exchanged. With ``counted``
    they are returned, too.
    """
    call = Sized(kind, x, out, "sum", root, None, ())
    usual = known is expected is dtype_name  # all None
    done, said = again(session, call, timeout, counted) if usual else (False, None)
    if done:
        return said
    where = _arrays(session, x, out)
    rank = session.rank
    name = "direct_pull" if kind == Kind.ALL_GATHER_V else "direct"
    request, limit = _asked(session, call.request, timeout)
    root = request.root
    given, rows, width, tail = session.refusing(lambda: _rows(where, x, dtype_name))
    has_out = kind == Kind.ALL_GATHER_V or rank == root
    session.refusing(lambda: _no_output(out, root, has_out))
    row = row_of(given.caller_code, width, [rows])
    if known is None:
        said = exchange(session, kind, row, limit) if said is None else said
        lengths = sizes_in(session, kind, said, limit)[:, 0]
        session.refusing(lambda: _check_expected(lengths.tolist(), expected))
    else:
        lengths = session.refusing(lambda: check_counts(known, session.world_size, None))
        session.refusing(lambda: _check_own(lengths, rank, rows))
    result, target = None, None
    if has_out:
        shape = (int(lengths.sum()), *tail)
        result, target = session.refusing(lambda: _output(where, given, shape, out))
    agreed = 0 if known is None else _seal(lengths, width)
    blocks = lengths * np.uint64(width), gathered, agreed
    like = _like(call, row, said, given, target) if usual else None
    found = where.run(session, (request, name), given, target, blocks, result, limit, like)
    return (found, lengths.astype(np.int64)) if counted else found


@in_parts
def scatter(
    session: Session, x: Any, counts: Any, root: int, out: Any, timeout: float | None
) -> Any:
    """Hand out blocks of different sizes of the root's array."""
    if x is None and isinstance(out, np.ndarray) and session.rank != root:
        x = out[:0]
    call = Sized(Kind.SCATTER_V, x, out, "sum", root, None, counts)
    done, said = again(session, call, timeout)
    if done:
        return said
    where = _arrays(session, x, out)
    n, rank = session.world_size, session.rank
    request, limit = _asked(session, call.request, timeout)
    given, rows, width, tail = session.refusing(lambda: _rows(where, x))
    expected = rows if rank == request.root else None
    table = session.refusing(lambda: check_counts(counts, n, expected))
    result, target = session.refusing(lambda: _output(where, given, (int(table[rank]), *tail), out))
    row = row_of(given.caller_code, width, table.tolist())
    said = exchange(session, request.kind, row, limit) if said is None else said
    check_counts_equal(session, request.kind, said, table, limit)
    blocks = table * np.uint64(width), scattered, 0
    like = _like(call, row, said, given, target)
    return where.run(session, (request, "direct"), given, target, blocks, result, limit, like)


@in_parts
def reduce_scatter(
    session: Session,
    x: Any,
    counts: Any,
    op: str,
    order: str | None,
    out: Any,
    timeout: float | None,
    dtype_name: str | None = None,
    known: bool = False,
) -> Any:
    """Combine arrays and hand out blocks of different sizes; for ``dtype_name`` see `_rows`.

    With ``known`` the counts are not exchanged: the engine compares a checksum of them.
    """
    op = session.refusing(lambda: own_op(op))
    call = Sized(Kind.REDUCE_SCATTER_V, x, out, op, 0, order, counts)
    usual = dtype_name is None and not known
    done, said = again(session, call, timeout) if usual else (False, None)
    if done:
        return said
    where = _arrays(session, x, out)
    n, rank = session.world_size, session.rank
    wanted = "tree" if order is None else order
    request, limit = _asked(session, call.request._replace(order=wanted), timeout)
    name = "direct_rank" if wanted == "rank" else "direct"
    given, rows, width, tail = session.refusing(lambda: _rows(where, x, dtype_name))
    table = session.refusing(lambda: check_counts(counts, n, rows))
    result, target = session.refusing(lambda: _output(where, given, (int(table[rank]), *tail), out))
    source = session.refusing(lambda: as_reducible(where.apart(given, target), op, "x"))
    target = session.refusing(lambda: as_reducible(target, op, "out"))
    row = row_of(given.caller_code, width, table.tolist())
    if not known:
        said = exchange(session, request.kind, row, limit) if said is None else said
        check_counts_equal(session, request.kind, said, table, limit)
    scale = source.array.size // max(1, given.array.size)
    agreed = _seal(table, width) if known else 0
    blocks = table * np.uint64(width * max(1, scale)), scattered, agreed
    like = _like(call, row, said, given, target) if usual else None
    return where.run(session, (request, name), source, target, blocks, result, limit, like)


@in_parts
def all_to_all(
    session: Session,
    x: Any,
    counts: Any,
    out: Any,
    timeout: float | None,
    expected: Sequence[int] | None = None,
    dtype_name: str | None = None,
    known: bool = False,
    counted: bool = False,
) -> Any:
    """Exchange blocks of different sizes between all pairs of ranks.

    For ``expected``, ``dtype_name`` and ``counted`` see `gather`. With ``known``, ``counts`` are
    the rows from each rank to each, ``[n, n]``, the same on all ranks, and nothing is exchanged.
    """
    kind = Kind.ALL_TO_ALL_V
    call = Sized(kind, x, out, "sum", 0, None, counts)
    usual = expected is dtype_name and not known
    done, said = again(session, call, timeout, counted) if usual else (False, None)
    if done:
        return said
    where = _arrays(session, x, out)
    n, rank = session.world_size, session.rank
    request, limit = _asked(session, call.request, timeout)
    given, rows, width, tail = session.refusing(lambda: _rows(where, x, dtype_name))
    row = b""
    if known:
        sent = session.refusing(lambda: check_matrix(counts, n, rank, rows))
    else:
        own = session.refusing(lambda: check_counts(counts, n, rows))
        row = row_of(given.caller_code, width, own.tolist())
        said = exchange(session, kind, row, limit) if said is None else said
        sent = sizes_in(session, kind, said, limit)
    session.refusing(lambda: _check_expected(sent[:, rank].tolist(), expected))
    result, target = session.refusing(
        lambda: _output(where, given, (int(sent[:, rank].sum()), *tail), out)
    )
    blocks = sent * np.uint64(width), exchanged, _seal(sent, width) if known else 0
    like = _like(call, row, said, given, target) if usual else None
    found = where.run(session, (request, "direct"), given, target, blocks, result, limit, like)
    return (found, sent[:, rank].astype(np.int64)) if counted else found


def bind_exchange(session: Session, x: Any, sent: np.ndarray, dtype_name: str) -> _C.BoundCall:
    """Bind an `all_to_all` of rows like those of x, for callers that run it with addresses.

    Args:
        session: The ranks.
        x: An array of rows.
        sent: Rows from each rank to each, ``[n, n]`` of uint64, the same on all ranks.
        dtype_name: See `_rows`.
    """
    given, _, width, _ = _rows(_HOST, x, dtype_name)
    blocks = sent * np.uint64(width), exchanged, _seal(sent, width)
    return _bound(session, CallRequest(Kind.ALL_TO_ALL_V), "direct", given, *blocks)

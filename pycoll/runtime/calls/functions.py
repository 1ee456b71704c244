"""Reductions whose operation is a function, which combines arrays in the thread that calls.

An ordinary collective moves the arrays of all ranks, in the name of the reduction, and then they
are folded. So the function may do anything, and all the arrays need memory meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.host_arrays import ArrayView, check_output, new_like, on_device, view
from pycoll.runtime.arrays.layouts import RESULT_SHAPE, stacked_shape
from pycoll.runtime.arrays.neutral import fill_with_neutral
from pycoll.runtime.calls.prepared import CallRequest, Prepared
from pycoll.types import ML_DTYPES, Kind, Order

Function = Callable[[Any, Any], Any]
_MOVES = {  # what brings a rank the arrays that it folds
    Kind.ALL_REDUCE: Kind.ALL_GATHER,
    Kind.REDUCE: Kind.GATHER,
    Kind.REDUCE_SCATTER: Kind.ALL_TO_ALL,
    Kind.SCAN: Kind.ALL_GATHER,
    Kind.EXSCAN: Kind.ALL_GATHER,
}


class Runner(Protocol):
    """What reductions need of their session."""

    rank: int
    world_size: int
    refusing: Callable[[Callable[[], Any]], Any]
    prepare: Callable[[CallRequest, Any, Any], Prepared]
    start: Callable[[Prepared, float, bool], Any]
    check: Callable[[CallRequest, float | None], tuple[int, float]]


def own_op(op: Any) -> Any:
    """Return the name of an operation of mpi4py or PyTorch, and anything else as it is.

    Raises:
        ArgumentError: For one of theirs that there is none here for.
    """
    torch = getattr(sys.modules.get("torch.distributed"), "ReduceOp", None)
    if isinstance(torch, type) and isinstance(op, torch):
        return _of_torch(op, torch)
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(op, MPI.Op):
        return op
    for theirs, ours in _OF_MPI.items():
        if op == getattr(MPI, theirs):
            return ours
    if op.is_predefined:
        raise ArgumentError(
            f"op is MPI's; of those {', '.join(_OF_MPI)} are accepted; MINLOC and MAXLOC are "
            "comm.minloc and comm.maxloc here, LAND, LOR and LXOR 'and', 'or' and 'xor' on bools"
        )
    return op


def _of_torch(op: Any, their: Any) -> str:
    for theirs, ours in _OF_TORCH.items():
        if op == getattr(their, theirs):
            return ours
    raise ArgumentError(f"op is PyTorch's; of those {', '.join(_OF_TORCH)} are accepted")


def function_for(kind: Kind, op: Any, x: Any) -> Function | None:
    """Return the function that combines arrays if the engine does not: the user's, or NumPy's."""
    if kind in _MOVES and callable(op) and not any(op is known for known in _OF_ONE):
        return _of_c(op)
    product = isinstance(op, str) and op == "prod" and not on_device(x)
    return np.multiply if kind in _MOVES and product and _is_complex(x) else None


def _is_complex(x: Any) -> bool:
    try:
        return view(x, "x").array.dtype in _COMPLEX
    except ArgumentError:  # the call says so, and tells the other ranks
        return False


_C_FUNCTION = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t
)


def _of_c(op: Any) -> Function:
    """Return a function of two arrays for one of C, of ctypes or `numba.cfunc`; others as is."""
    pointer = getattr(op, "ctypes", op)
    if not isinstance(pointer, ctypes._CFuncPtr):
        return op
    call = _C_FUNCTION(ctypes.cast(pointer, ctypes.c_void_p).value)

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        out = np.empty_like(a)
        call(a.ctypes.data, b.ctypes.data, out.ctypes.data, a.size)
        return out

    function.__name__ = _name(op)
    return function


# Functions of one array, whose elements they combine.
_OF_ONE = (sum, min, max, any, all, np.sum, np.prod, np.min, np.max, np.mean, np.any, np.all)
_COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))


_OF_MPI = {
    **{"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max"},
    **{"BAND": "and", "BOR": "or", "BXOR": "xor"},
}
_OF_TORCH = {
    **{"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"},
    **{"BAND": "and", "BOR": "or", "BXOR": "xor"},
}


def reduce_with(
    session: Runner,
    request: CallRequest,
    function: Function,
    x: Any,
    out: Any,
    limit: float,
    later: bool,
) -> Any:
    """Run a reduction by a function; see `pycoll.Communicator.all_reduce`.

    Args:
        session: Of the communicator.
        request: The call; its ``op`` is the function, or a name that the function stands for.
        function: What combines two arrays.
        x: Array of this rank.
        out: Array for the result, or None.
        limit: Seconds that the call may take.
        later: Whether it was to run in the background, which it cannot.
    """
    kind = request.kind
    op = CallRequest(kind, "sum", request.root, request.order)
    root, _ = session.refusing(lambda: session.check(op, None))
    request = request._replace(root=root)
    prepared, given, rows = session.refusing(lambda: _prepare(session, request, x, out, later))
    session.start(prepared, limit, False)
    last = {Kind.SCAN: session.rank + 1, Kind.EXSCAN: session.rank}.get(kind, session.world_size)
    if rows is None or (last == 0 and callable(request.op)):
        return None
    shape = rows.shape[1:]
    if last == 0:
        result = new_like(given, shape) if out is None else out
        fill_with_neutral(view(result, "out"), request.op)
        return result
    usual = "rank" if kind in (Kind.SCAN, Kind.EXSCAN) else "tree"
    in_line = (request.order or usual) == Order.RANK.name.lower()
    parts = [rows[rank, ...] for rank in range(last)]
    found = np.asarray(_in_line(parts, function) if in_line else _in_tree(parts, function))
    if found.shape != shape or found.dtype != rows.dtype:
        raise ArgumentError(
            f"op={_name(function)} gave {found.dtype}{list(found.shape)} for two arrays "
            f"{rows.dtype}{list(shape)}; it must return one of their shape and dtype"
        )
    result = new_like(given, shape) if out is None else out
    target = view(result, "out").array
    target[...] = found.reshape(target.shape)
    return result


def _prepare(
    session: Runner, request: CallRequest, x: Any, out: Any, later: bool
) -> tuple[Prepared, ArrayView, np.ndarray | None]:
    """Return the call that moves the arrays, this rank's array, and where those of all will be."""
    name, kind, n = _name(request.op), request.kind, session.world_size
    if later or request.algorithm is not None:
        wrong = "async_op" if later else "algorithm="
        raise ArgumentError(f"op={name} runs in the calling thread, so {wrong} is not for it")
    given = view(x, "x")
    if given.name in ML_DTYPES and given.array.dtype.kind == "u":
        raise ArgumentError(f"op={name} takes NumPy arrays, which have no {given.name}; convert x")
    shape = RESULT_SHAPE[kind](given.array.shape, n)
    receives = kind != Kind.REDUCE or session.rank == request.root
    if out is not None:
        if not receives:
            raise ArgumentError(f"out is for the root, rank {request.root}")
        stacked = stacked_shape(kind, tuple(given.array.shape), n)
        check_output(view(out, "out"), shape, given, stacked=stacked)
    own = np.ascontiguousarray(given.array)
    rows = None
    if receives:  # not symmetric memory, even where NumPy would take it
        memory = bytearray(n * own.nbytes // (n if kind == Kind.REDUCE_SCATTER else 1))
        rows = np.frombuffer(memory, own.dtype).reshape(n, *shape)
    seal = zlib.crc32(name.encode()) | 1  # of functions the names are compared
    moves = CallRequest(_MOVES[kind], root=request.root, within=kind, agreed=seal)
    own = own.reshape(n, *shape) if kind == Kind.REDUCE_SCATTER else own.reshape(1, *shape)
    return session.prepare(moves, own, rows), given, rows


def _in_line(parts: Sequence[Any], function: Function) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = function(total, part)
    return total


def _in_tree(parts: Sequence[Any], function: Function) -> Any:
    """Fold along the in-order balanced tree; see docs/architecture.md, section 1."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    pairs = [function(parts[2 * i], parts[2 * i + 1]) for i in range(extra)]
    level = [*pairs, *parts[2 * extra :]]
    while len(level) > 1:
        level = [function(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    return getattr(function, "__name__", type(function).__name__)

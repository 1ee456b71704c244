"""NCCL behind a handful of functions: by nccl4py where it is installed, else by CuPy's binding.

Messages are bytes; only NCCL's own collectives need to know element types.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pycoll.cuda.device.library import unavailable
from pycoll.errors import ArgumentError, CudaUnavailable, TransportError
from pycoll.types import DType, Kind, ReduceOp

# Values of ncclDataType_t and ncclRedOp_t, which NCCL has never changed (nccl.h).
_BYTES = 0
_TYPES = {
    DType.INT8: 0,
    DType.UINT8: 1,
    DType.INT32: 2,
    DType.UINT32: 3,
    DType.INT64: 4,
    DType.UINT64: 5,
    DType.FLOAT16: 6,
    DType.FLOAT32: 7,
    DType.FLOAT64: 8,
    DType.BFLOAT16: 9,
    DType.FLOAT8_E4M3FN: 10,  # on devices of compute capability 9.0 and later
    DType.FLOAT8_E5M2: 11,
}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
_SUCCESS, _IN_PROGRESS = 0, 7
UNIQUE_ID_BYTES = 128
NATIVE = "native"
"""Name of the algorithm that stands for NCCL's own collective."""


class Binding:
    """One rank's NCCL communicator; what the bindings have in common."""

    name: str
    _NATIVE: ClassVar[dict[Kind, str]]  # NCCL's own collectives, as the binding spells them
    _comm: Any  # the communicator as a whole
    _functions: Any  # what has the functions of point-to-point and collective communication
    _handle: tuple[Any, ...] = ()  # what they take before the stream
    _group_ends: tuple[Callable[[], Any], Callable[[], Any]]

    @contextmanager
    def group(self) -> Iterator[None]:
        """Post all messages of the body together."""
        start, end = self._group_ends
        _checked(start)
        try:
            yield
        finally:
            _checked(end)

    def send(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Post one end of a message."""
        self._run("send", pointer, nbytes, _BYTES, peer, stream=stream)

    def recv(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """Post the other end."""
        self._run("recv", pointer, nbytes, _BYTES, peer, stream=stream)

    def native(
        self,
        kind: Kind,
        pointers: tuple[int, int],
        count: int,
        code: int,
        more: tuple[Any, ...],
        stream: int,
    ) -> None:
        """Run NCCL's own collective; ``more`` holds the operation, the root, or nothing."""
        if kind not in self._NATIVE:
            raise ArgumentError(
                f"CuPy's binding has no {kind.name.lower()} of NCCL; install nccl4py, or name "
                "another algorithm"
            )
        self._run(self._NATIVE[kind], *pointers, count, code, *more, stream=stream)

    def _run(self, name: str, *arguments: Any, stream: int) -> None:
        _checked(getattr(self._functions, name), *arguments, *self._handle, stream)

    def abort(self) -> None:
        """End everything under way, and the communicator."""
        self._comm.abort()

    def close(self) -> None:
        """Free the communicator after its last operation."""
        self._comm.destroy()


class Nccl4py(Binding):
    """The official binding, nccl4py 0.6 or later."""

    name = "nccl4py"
    _NATIVE: ClassVar = {
        Kind.ALL_REDUCE: "all_reduce",
        Kind.REDUCE_SCATTER: "reduce_scatter",
        Kind.ALL_GATHER: "all_gather",
        Kind.BROADCAST: "broadcast",
        Kind.REDUCE: "reduce",
        Kind.ALL_TO_ALL: "allto_all",
        Kind.GATHER: "gather",
        Kind.SCATTER: "scatter",
    }

    def __init__(self, n: int, rank: int, unique_id: bytes) -> None:
        """Join; a collective of all n ranks."""
        core, self._functions = _nccl4py()
        key = core.UniqueId.from_bytes(unique_id)
        self._comm = _checked(core.Communicator.init, n, rank, key)
        self._handle = (self._functions.Comm(self._comm.ptr),)
        self._group_ends = self._functions.group_start, self._functions.group_end

    @staticmethod
    def unique_id() -> bytes:
        """Make the key with which n ranks find each other."""
        return bytes(_checked(_nccl4py()[0].get_unique_id).as_bytes)

    @staticmethod
    def version() -> int:
        """Return the version of the library, such as 23203."""
        raw = _nccl4py()[1]
        try:
            return int(raw.get_version())
        except (OSError, RuntimeError) as error:  # it looks for the library only now
            found = str(error).partition("\n")[0]
            raise unavailable(
                f"nccl4py finds no NCCL library ({found})", "pip install nvidia-nccl-cu13"
            ) from error

    def error(self) -> str:
        """Return what has gone wrong in the background, or ``""``."""
        state = int(self._functions.comm_get_async_error(*self._handle))
        if state in (_SUCCESS, _IN_PROGRESS):
            return ""
        return f"{self._functions.get_error_string(state)}: {self._comm.get_last_error()}"


class Cupy(Binding):
    """The binding that CuPy brings."""

    name = "cupy.cuda.nccl"
    _NATIVE: ClassVar = {
        Kind.ALL_REDUCE: "allReduce",
        Kind.REDUCE_SCATTER: "reduceScatter",
        Kind.ALL_GATHER: "allGather",
        Kind.BROADCAST: "broadcast",
        Kind.REDUCE: "reduce",
    }

    def __init__(self, n: int, rank: int, unique_id: bytes) -> None:
        """Join; a collective of all n ranks."""
        self._nccl = _cupy_nccl()
        self._comm = self._functions = _checked(self._nccl.NcclCommunicator, n, unique_id, rank)
        self._group_ends = self._nccl.groupStart, self._nccl.groupEnd

    @staticmethod
    def unique_id() -> bytes:
        """Make the key with which n ranks find each other."""
        key = _checked(_cupy_nccl().get_unique_id)
        return key if isinstance(key, bytes) else bytes(v & 0xFF for v in key)  # CuPy < 14

    @staticmethod
    def version() -> int:
        """Return the version of the library, such as 23203."""
        return int(_cupy_nccl().get_version())

    def error(self) -> str:
        """Return what has gone wrong in the background, or ``""``."""
        try:
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        return ""


BINDINGS: tuple[type[Nccl4py] | type[Cupy], ...] = (Nccl4py, Cupy)
"""In order of preference."""


def find_binding() -> type[Nccl4py] | type[Cupy]:
    """Return the first binding that can be used.

    Raises:
        CudaUnavailable: If there is none, with the reasons.
    """
    reasons = []
    for binding in BINDINGS:
        try:
            binding.version()
        except (CudaUnavailable, TransportError) as error:
            reasons.append(f"{binding.name}: {error.args[0].splitlines()[0].rstrip('.')}")
        else:
            return binding
    raise unavailable(
        f"no binding of NCCL can be used ({'; '.join(reasons)})", "pip install 'nccl4py[cu13]'"
    )


def native_arguments(
    kind: Kind, dtype: DType | None, op: ReduceOp, root: int, itemsize: int
) -> tuple[int, int, tuple[int, ...]]:
    """Return NCCL's element type, its elements in one of ours, and the arguments behind it.

    Raises:
        ArgumentError: If NCCL has no such reduction.
    """
    reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
    rooted = kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)
    more = ((_OPS.get(op, -1),) if reduces else ()) + ((root,) if rooted else ())
    if not reduces:
        return _BYTES, itemsize, more
    if dtype not in _TYPES or op not in _OPS:
        raise ArgumentError(
            f"NCCL has no {op.name.lower()} of {dtype.name.lower() if dtype else 'this type'}; "
            "name another algorithm than 'native'"
        )
    return _TYPES[dtype], 1, more


def _checked(function: Callable, *args: Any) -> Any:
    """Call NCCL and turn its failures into pycoll's."""
    try:
        return function(*args)
    except Exception as error:  # each binding has classes of its own, of no common kind
        module = type(error).__module__
        if module.startswith(("nccl", "cupy")):
            raise TransportError(f"NCCL: {error}. Set NCCL_DEBUG=WARN to see more.") from error
        raise


def _nccl4py() -> tuple[Any, Any]:
    names, fix = ("nccl.core", "nccl.bindings.nccl"), "pip install 'nccl4py[cu13]'"
    core, raw = (_imported(name, "nccl4py", fix) for name in names)
    return core, raw


def _cupy_nccl() -> Any:
    module = _imported("cupy.cuda.nccl", "CuPy", "pip install cupy-cuda13x")
    if not module.available:
        raise unavailable("CuPy finds no NCCL library", "pip install nvidia-nccl-cu13")
    return module


def _imported(name: str, product: str, fix: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's, where there is no NCCL; that is seen below
            return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise unavailable(f"{product} cannot be imported: {error}", fix) from error

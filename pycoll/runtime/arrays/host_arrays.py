"""From any CPU array to memory: NumPy, the buffer protocol, ``__array_interface__``, DLPack.

Everything becomes an `ArrayView`: a NumPy array over the same memory, with pycoll's name for its
element type. No array library other than NumPy is imported; a PyTorch tensor comes in through
DLPack.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from pycoll import _C
from pycoll.errors import ArgumentError, kind_of
from pycoll.types import ML_DTYPES, DType, type_code

_NUMPY_TYPES = {
    np.dtype(name): DType[name.upper()]
    for name in "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex", 6: "bool"}
_DLPACK_VERSION = (1, 1)
_DLPACK_ML_DTYPES = {  # by type code and bits
    (4, 16): DType.BFLOAT16,
    (10, 8): DType.FLOAT8_E4M3FN,
    (12, 8): DType.FLOAT8_E5M2,
}
_DLPACK_CPU = (1, 3)  # plain and page-locked host memory
_DLPACK_CUDA = (2, 13)  # device memory, managed memory
_COMPLEX = {np.dtype(np.complex64): DType.FLOAT32, np.dtype(np.complex128): DType.FLOAT64}


class ArrayView(NamedTuple):
    """A NumPy array over the caller's memory."""

    array: np.ndarray  # the memory; types of ml_dtypes may appear as unsigned integers
    # element type for reductions, or None if the type can be moved but not reduced
    dtype: DType | None
    name: str
    source: Any  # the object that the caller passed
    apart: bool = False  # it is a copy, for the memory of the source will be written to

    @property
    def code(self) -> int:
        """Number of the element type that the engine works with."""
        return self.caller_code if self.dtype is None else int(self.dtype)

    @property
    def caller_code(self) -> int:
        """Number of the caller's element type, which has to be the same on all ranks.

        It differs from `code` where the engine folds something else: the parts of complex numbers.
        """
        fields = self.array.dtype.names is not None
        return type_code(_layout(self.array.dtype) if fields else self.name)

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return _C.address(self.array)


def _layout(dtype: np.dtype) -> str:
    """Return all that makes a type: for a record the names, types and places of its fields."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{_layout(base)}{shape}"
    if dtype.names is None:
        return dtype.name
    fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
    parts = ", ".join(f"{name!r}: {_layout(kind)} at {place}" for name, kind, place in fields)
    return f"{{{parts}}} of {dtype.itemsize}"


def _named(dtype: np.dtype) -> tuple[DType | None, str]:
    if dtype.kind in "mM":  # those that are equal may have other names
        return None, dtype.name
    return _known(dtype)


@functools.lru_cache(maxsize=256)  # a name takes NumPy some microseconds
def _known(dtype: np.dtype) -> tuple[DType | None, str]:
    return dtype_of(dtype), dtype.name


def dtype_of(dtype: np.dtype) -> DType | None:
    """Return pycoll's name for a NumPy dtype, or None if it cannot be reduced."""
    found = _NUMPY_TYPES.get(dtype)
    return ML_DTYPES.get(dtype.name) if found is None else found


def view(x: Any, what: str) -> ArrayView:
    """Look at any CPU array.

    Raises:
        ArgumentError: If ``x`` is no array, lives on a device, is masked, or holds Python objects.
    """
    if isinstance(x, np.ndarray):
        if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
            raise ArgumentError(
                f"{what} is a masked array, whose mask would be lost; pass {what}.filled(value)"
            )
        array = x
    elif hasattr(x, "__array_interface__"):
        array = np.asarray(x)
    elif hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what)
    else:
        array = _from_buffer(x, what)
    if array.dtype.hasobject:
        raise ArgumentError(
            f"{what} has dtype {array.dtype}, which holds Python objects; "
            "arrays of numbers, booleans or fixed-size records are accepted; objects travel by "
            "all_gather_object and the like"
        )
    if not array.dtype.isnative:
        raise ArgumentError(
            f"{what} has dtype {array.dtype.str!r} in foreign byte order; "
            f"convert it with {what}.astype({what}.dtype.newbyteorder('='))"
        )
    if array.dtype.itemsize == 0:
        raise ArgumentError(f"{what} has dtype {array.dtype}, whose elements have no bytes")
    return ArrayView(array, *_named(array.dtype), x)


def _from_buffer(x: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        if hasattr(x, "to_numpy"):  # pandas and the like
            raise ArgumentError(f"{what} is {kind_of(x)}; pass {what}.to_numpy()") from None
        if x is None:
            raise ArgumentError(
                f"{what} is None; every rank passes an array, and one that only receives an array "
                "of the shape and dtype that come, such as np.empty(shape); for None as an object "
                "there are broadcast_object, all_gather_object, send_object and the like"
            ) from None
        raise ArgumentError(
            f"{what} is {kind_of(x)}; accepted are NumPy arrays and objects with the "
            "buffer protocol, __array_interface__ or __dlpack__; for any other Python object there "
            "are broadcast_object, all_gather_object, send_object and the like"
        ) from None


def on_device(x: Any) -> bool:
    """Whether an object is an array on a CUDA device."""
    if x is None or isinstance(x, np.ndarray) or hasattr(x, "__array_interface__"):
        return False
    if hasattr(x, "__dlpack_device__"):
        return _dlpack_device(x, "an array") in _DLPACK_CUDA
    return hasattr(x, "__cuda_array_interface__")


def _dlpack_device(x: Any, what: str) -> int:
    try:
        return int(x.__dlpack_device__()[0])
    except AttributeError as error:  # a tracer of JAX
        raise ArgumentError(
            f"{what} is {kind_of(x)}, which has no memory; inside jax.jit, call pycoll by "
            "jax.experimental.io_callback, with ordered=True"
        ) from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{what} cannot be shared through DLPack: {error}") from error


def _from_dlpack(x: Any, what: str) -> ArrayView:
    device = _dlpack_device(x, what)
    if device not in _DLPACK_CPU:
        raise ArgumentError(f"{what} lives on a device (DLPack type {device}), not on the CPU")
    return dlpack_view(x, what)


def dlpack_view(x: Any, what: str, **options: Any) -> ArrayView:
    """Look at an array through DLPack, wherever it lies."""
    if hasattr(x, "is_neg") and x.is_neg():  # PyTorch would show the elements without their sign
        raise ArgumentError(f"{what} has its negative bit set; pass {what}.resolve_neg()")
    try:
        capsule = _capsule(x, options)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ArgumentError(f"{what} cannot be shared through DLPack: {error}") from error
    try:
        kind, bits, pointer, shape, strides, owner, writable = _C.open_dlpack(capsule)
    except _C.EngineError as error:
        raise ArgumentError(f"{what} cannot be shared through DLPack: {error.args[-1]}") from None
    if (other := _DLPACK_ML_DTYPES.get((kind, bits))) is not None:
        own = getattr(x, "dtype", None)  # JAX has types of ml_dtypes
        dtype = own if isinstance(own, np.dtype) else np.dtype(f"u{bits // 8}")
        known, name = other, other.name.lower()
    elif scalar := getattr(np, f"{_DLPACK_KINDS.get(kind)}{bits}".replace("bool8", "bool_"), None):
        dtype = np.dtype(scalar)
        known, name = dtype_of(dtype), dtype.name
    else:
        raise ArgumentError(
            f"{what} has elements of a type that NumPy has not (DLPack code {kind}, {bits} bits); "
            f"to move it, pass it as integers, such as {what}.view(torch.uint8)"
        )
    if 0 not in shape:
        last = sum((k - 1) * s for k, s in zip(shape, strides, strict=True))
        _check_memory(x, pointer, (last + 1) * dtype.itemsize, what)
    strides_bytes = tuple(s * dtype.itemsize for s in strides)
    array = _C.array_at(pointer, shape, strides_bytes, dtype, owner)
    # JAX shows its arrays, which never change, by capsules that cannot say so.
    if not writable or type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        array.flags.writeable = False
    return ArrayView(array, known, name, x)


def _check_memory(x: Any, pointer: int, nbytes: int, what: str) -> None:
    """Refuse a tensor whose memory is not there: PyTorch shows an address all the same."""
    if hasattr(x, "untyped_storage"):
        before = x.storage_offset() * x.element_size()
        if x.untyped_storage().nbytes() < before + nbytes:
            raise ArgumentError(f"{what} is {kind_of(x)} whose memory has been freed")
    if not pointer:
        raise ArgumentError(f"{what} is {kind_of(x)} without memory of its own")


def _capsule(x: Any, options: dict[str, Any]) -> Any:
    """Return a DLPack capsule, one that tells whether memory may be written to if there is one."""
    try:
        return x.__dlpack__(max_version=_DLPACK_VERSION, **options)
    except TypeError:  # a library from before DLPack 1.0
        return x.__dlpack__(**options)


def as_reducible(v: ArrayView, op: str, what: str) -> ArrayView:
    """Return a view that can be reduced: complex becomes pairs of reals.

    Raises:
        ArgumentError: If the operation is not defined for the element type.
    """
    if v.dtype is not None:
        if op in ("and", "or", "xor") and v.dtype.is_float:
            raise ArgumentError(f"op={op!r} is defined for integers and bool; {what} is {v.name}")
        return v
    dtype = v.array.dtype
    if dtype in _COMPLEX and op in ("sum", "avg") and v.array.flags.c_contiguous:
        parts = v.array.reshape(-1).view(f"f{dtype.itemsize // 2}")
        return ArrayView(parts, _COMPLEX[dtype], v.name, v.source)
    if dtype == np.bool_ and op in ("and", "or", "xor", "min", "max"):
        return ArrayView(v.array.view(np.uint8), DType.BOOL, v.name, v.source)
    hint = f"; {what}.astype(int) counts" if dtype == np.bool_ and op in ("sum", "avg") else ""
    if dtype.kind in "mM":  # NaT is the least of these numbers
        hint = f"; {what}.view(np.int64) is accepted"
    raise ArgumentError(
        f"op={op!r} is not defined for {what} of dtype {dtype if dtype.names else v.name}; "
        "accepted are int8..uint64, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, "
        f"float64, complex with sum, prod or avg, bool with and, or, xor, min, max{hint}"
    )


def check_output(
    v: ArrayView,
    shape: tuple[int, ...],
    like: ArrayView | None,
    what: str = "out",
    *,
    stacked: tuple[int, ...] | None = None,
) -> None:
    """Refuse an output that cannot take the result in place; any dtype will do if `like` is None.

    It has the shape `shape`, or `stacked` if there is that other one.

    Raises:
        ArgumentError: For a wrong shape or dtype, a read-only or a non-contiguous array, or memory
            that is not the caller's own.
    """
    if like is not None and not _is_same_type(v, like):
        raise ArgumentError(f"{what} has dtype {_spelled(v)}, but x has dtype {_spelled(like)}")
    if tuple(v.array.shape) not in (tuple(shape), stacked):
        either = "" if stacked is None else f" or {stacked}"
        raise ArgumentError(
            f"{what} has shape {v.array.shape}; this call writes shape {tuple(shape)}{either}"
        )
    if not v.array.flags.writeable:
        raise ArgumentError(f"{what} is read-only")
    if _is_copy(v):
        raise ArgumentError(
            f"{what} is {kind_of(v.source)} whose memory cannot be written to, only that "
            "of a copy; pass an array, such as np.zeros(()) for a single number"
        )
    if not v.array.flags.c_contiguous:
        raise ArgumentError(
            f"{what} is not C-contiguous (shape {v.array.shape}, strides {v.array.strides}); "
            "pass a contiguous array and copy from it"
        )


def _is_same_type(a: ArrayView, b: ArrayView) -> bool:
    return a.dtype == b.dtype and (a.dtype is not None or a.array.dtype == b.array.dtype)


def _spelled(v: ArrayView) -> str:
    return v.name if v.array.dtype.names is None else str(v.array.dtype)


def _is_copy(v: ArrayView) -> bool:
    """Whether NumPy shows a copy: of a scalar it does, and then a second look finds another one."""
    if isinstance(v.source, np.ndarray) or not hasattr(v.source, "__array_interface__"):
        return False
    again = np.asarray(v.source).__array_interface__["data"][0]
    return v.array.nbytes > 0 and again != v.pointer


def new_like(v: ArrayView, shape: tuple[int, ...]) -> Any:
    """Make an uninitialised array of the caller's own kind."""
    if hasattr(v.source, "new_empty"):
        return v.source.new_empty(shape)
    return np.empty(shape, v.array.dtype)


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two contiguous arrays have memory in common."""
    apart = a.pointer + a.array.nbytes <= b.pointer or b.pointer + b.array.nbytes <= a.pointer
    return not apart and min(a.array.nbytes, b.array.nbytes) > 0

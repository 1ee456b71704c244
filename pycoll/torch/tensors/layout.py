"""What the engine has to know of a tensor: its memory, its type, how its elements combine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import cuda

from pycoll.errors import ArgumentError, kind_of
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.types import DType, Kind, ReduceOp, type_code

_NAMES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
_NAMES += "float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64"
Tensors = list[torch.Tensor]
DTYPES = {getattr(torch, name): DType[name.upper()] for name in _NAMES.split()}
"""Types that reductions understand."""

OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PROD,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.AND,
    dist.ReduceOp.BOR: ReduceOp.OR,
    dist.ReduceOp.BXOR: ReduceOp.XOR,
}
_BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
# Of truth values, as PyTorch combines them.
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PROD: ReduceOp.MIN,
    **{op: op for op in (*_BITWISE, ReduceOp.MIN, ReduceOp.MAX)},
}


IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
"""Collectives whose input may be their output."""


class Request(NamedTuple):
    """What a rank asks for in a collective call, apart from its tensors.

    Attributes:
        kind: The collective.
        op: How elements are combined; None if they are only moved.
        root: Root rank, or 0.
        site: Number of the call site in the program.
        timeout_s: Longest time to wait for the peers.
    """

    kind: Kind
    op: ReduceOp | None
    root: int
    site: int
    timeout_s: float


class Reduction(NamedTuple):
    """How elements of all ranks are combined."""

    op: ReduceOp
    factor: float | torch.Tensor | None = None  # every rank multiplies its elements by it first


def reduction(op: dist.ReduceOp) -> Reduction:
    """Translate PyTorch's reduction operation."""
    kind = op.op if isinstance(op, dist.ReduceOp) else op
    known = OPS.get(kind)
    if known is not None:
        return Reduction(known)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return Reduction(ReduceOp.SUM, op.__getstate__()[1])
    raise ArgumentError(f"{kind} is not known; accepted: {', '.join(o.name for o in OPS)}")


def check(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor whose memory the engine cannot work on."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        raise ArgumentError(
            f"{what} {kind}; only dense tensors are moved, and sparse COO tensors of CPUs summed "
            "by all_reduce: use tensor.to_dense(), or the tensors that it is made of"
        )
    if tensor.is_quantized:
        raise ArgumentError(
            f"{what} is quantized, and its scale would not be moved; use tensor.int_repr()"
        )
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ArgumentError(
            f"{what} lives on {tensor.device}; this backend moves tensors of CPUs and CUDA devices"
        )


def _own(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor that has memory: a FakeTensor has none, and FSDP frees that of others."""
    if not tensor.numel():
        return tensor
    first, held = tensor.storage_offset() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if held < first + tensor.nbytes:
        raise ArgumentError(
            f"{what} has {tensor.nbytes} bytes whose memory has been freed (its storage was "
            f"resized to {held}); resize it before the call"
        )
    if tensor.data_ptr() == first:  # it counts from 0
        raise ArgumentError(f"{what} is {kind_of(tensor)} without memory of its own")
    return tensor


def name_of(dtype: torch.dtype) -> str:
    """Return the name of an element type: NumPy's, if NumPy has the type."""
    return str(dtype).removeprefix("torch.")


def code(dtype: torch.dtype) -> int:
    """Return the number that stands for an element type in a call descriptor."""
    return type_code(name_of(dtype))


def source(tensor: torch.Tensor, what: str = "the input") -> torch.Tensor:
    """Return the elements of a tensor in contiguous memory: its own if that is contiguous."""
    check(tensor, what)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return _own(tensor.contiguous(), what)


def check_output(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that cannot be written to."""
    check(tensor, what)
    if not tensor.is_contiguous() and _overlaps_itself(tensor):
        raise ArgumentError(
            f"{what} has several elements in one place of memory, like all expanded tensors, and "
            "cannot be written to; clone() it"
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return False
    reach, apart = 0, True  # from the first to the last element along the axes with small strides
    for stride, k in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if k > 1 and not stride:
            return True
        if k > 1:
            apart = apart and stride > reach
            reach += (k - 1) * stride
    if apart:
        return False
    taken = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    taken.as_strided(tensor.shape, tensor.stride(), 0).fill_(True)
    return int(taken.sum()) < tensor.numel()  # otherwise the axes only interlock


def target(tensor: torch.Tensor, what: str = "the output") -> torch.Tensor:
    """Return contiguous memory to receive a tensor: its own, or a buffer for `store`."""
    check_output(tensor, what)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return _own(tensor.detach() if tensor.requires_grad else tensor, what)
    return tensor.new_empty(tensor.shape)


def store(received: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what was received into the tensor of the caller, unless it is there already."""
    if received.data_ptr() != tensor.data_ptr():
        _fill(tensor, received)


def _fill(tensor: torch.Tensor, received: torch.Tensor) -> None:
    tensor.data.copy_(received)
    if received.is_cuda:  # its memory is released after this
        received.record_stream(cuda.current_stream(received.device))


def unpack(flat: torch.Tensor, tensors: Tensors) -> None:
    """Copy consecutive pieces of a flat tensor into tensors of the caller."""
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        _fill(tensor, piece.view(tensor.shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a flat one of bytes."""
    # A tensor of one element may have any stride, which a view of another type would refuse.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def apart(x: torch.Tensor, out: torch.Tensor | None, memory: Memory | None) -> torch.Tensor:
    """Return an input, or a copy of it if it overlaps the output; both are contiguous."""
    if out is None:
        return x
    a, b = x.data_ptr(), out.data_ptr()
    if a + x.nbytes <= b or b + out.nbytes <= a:
        return x
    return empty_beside(x, memory).copy_(x)


def empty_beside(x: torch.Tensor, memory: Memory | None) -> torch.Tensor:
    """Return an empty tensor like a contiguous one; in symmetric memory if that is there."""
    a = x.data_ptr()
    if memory is None or not (memory.heap.contains(a, x.nbytes) or memory.locate(a, x.nbytes)):
        return torch.empty_like(x)
    block = torch.from_numpy(memory.empty(x.nbytes, np.uint8))
    return block.view(x.dtype).view(x.shape)


def as_reducible(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, DType, ReduceOp]:
    """Return a contiguous tensor as the engine combines it, the type of it, and the operation."""
    dtype = tensor.dtype
    known = DTYPES.get(dtype)
    if known is not None and not (known.is_float and op in _BITWISE):
        return tensor, known, op
    if dtype is torch.bool and op in _BOOL_OPS:
        return tensor.view(torch.uint8), DType.BOOL, _BOOL_OPS[op]
    if dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.AVG):
        real = torch.view_as_real(tensor)
        if real.dtype in DTYPES:
            return real, DTYPES[real.dtype], op
    raise ArgumentError(
        f"{op.name} is not defined for {dtype}; accepted are integers, float8_e4m3fn, float8_e5m2, "
        "float16, bfloat16, float32, float64 (no bitwise operations on floats), bool without AVG, "
        "complex with SUM and AVG"
    )

"""What the engine has to know of a tensor: its memory, its type, and how its elements combine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import cuda

from pycoll.errors import ArgumentError, kind_of
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.types import DType, ReduceOp, type_code

_NAMES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
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
# A bool is a byte that holds 0 or 1, and the result has to be one again.
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PROD: ReduceOp.MIN,
    **{op: op for op in (*_BITWISE, ReduceOp.MIN, ReduceOp.MAX)},
}


class Reduction(NamedTuple):
    """How elements of all ranks are combined.

    Attributes:
        op: The operation.
        factor: What every rank's elements are multiplied by first, or None.
    """

    op: ReduceOp
    factor: float | torch.Tensor | None = None


def reduction(op: dist.ReduceOp) -> Reduction:
    """Return PyTorch's reduction operation in pycoll's words.

    Raises:
        ArgumentError: For an operation that is not known.
    """
    kind = op.op if isinstance(op, dist.ReduceOp) else op
    known = OPS.get(kind)
    if known is not None:
        return Reduction(known)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return Reduction(ReduceOp.SUM, op.__getstate__()[1])
    raise ArgumentError(f"{kind} is not known; accepted: {', '.join(o.name for o in OPS)}")


def check(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor whose memory the engine cannot work on.

    Raises:
        ArgumentError: For tensors that are not dense, that are quantized or nested, and those of
            other devices than CUDA's.
    """
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
    """Return a tensor that has memory; that of FSDP's tensors is freed and had again.

    Raises:
        ArgumentError: If it has none, as a FakeTensor, or less than it needs.
    """
    first, held = tensor.storage_offset() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if held < first + tensor.nbytes and tensor.numel():
        raise ArgumentError(
            f"{what} has {tensor.nbytes} bytes whose memory has been freed (its storage was "
            f"resized to {held}); resize it before the call"
        )
    before = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() and tensor.data_ptr() == before:  # it counts from 0
        raise ArgumentError(f"{what} is {kind_of(tensor)} without memory of its own")
    return tensor


def name_of(dtype: torch.dtype) -> str:
    """Return the name of an element type, which is NumPy's where it has one for it."""
    return str(dtype).removeprefix("torch.")


def code(dtype: torch.dtype) -> int:
    """Return the number that stands for an element type in a call descriptor."""
    return type_code(name_of(dtype))


def source(tensor: torch.Tensor, what: str = "the input") -> torch.Tensor:
    """Return the elements of a tensor in contiguous memory: its own if they lie like that."""
    check(tensor, what)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return _own(tensor.contiguous(), what)


def check_output(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that cannot be written to.

    Raises:
        ArgumentError: If several of its elements are one in memory.
    """
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
    """Return contiguous memory to receive a tensor: its own, or else to be given to `store`."""
    check_output(tensor, what)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return _own(tensor.detach() if tensor.requires_grad else tensor, what)
    return tensor.new_empty(tensor.shape)


def store(received: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put what was received into the tensor of the caller, if it is not there already."""
    if received.data_ptr() != tensor.data_ptr():
        fill(tensor, received)


def fill(tensor: torch.Tensor, received: torch.Tensor) -> None:
    """Copy elements into a tensor of the caller, from memory that is then let go."""
    tensor.data.copy_(received)
    if received.is_cuda:
        received.record_stream(cuda.current_stream(received.device))


def apart(x: torch.Tensor, out: torch.Tensor | None, memory: Memory | None) -> torch.Tensor:
    """Return the elements in memory that the output does not touch, symmetric if theirs is.

    Args:
        x: The input, contiguous.
        out: The output, contiguous.
        memory: Where symmetric tensors are; None if there are none.

    Raises:
        MemoryError: If the symmetric heap is full.
    """
    if out is None:
        return x
    a, b = x.data_ptr(), out.data_ptr()
    if a + x.nbytes <= b or b + out.nbytes <= a:
        return x
    return beside(x, memory).copy_(x)


def beside(x: torch.Tensor, memory: Memory | None) -> torch.Tensor:
    """Return room for a contiguous tensor like another, symmetric if that is; see `apart`."""
    a = x.data_ptr()
    if memory is None or not (memory.heap.contains(a, x.nbytes) or memory.locate(a, x.nbytes)):
        return torch.empty_like(x)
    block = torch.from_numpy(memory.empty(x.nbytes, np.uint8))
    return block.view(x.dtype).view(x.shape)


def as_reducible(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, DType, ReduceOp]:
    """Return a view of elements that the engine can combine, their type, and the operation.

    Args:
        tensor: Contiguous.
        op: The operation.

    Raises:
        ArgumentError: If the operation is not defined for the element type.
    """
    dtype = tensor.dtype
    known = DTYPES.get(dtype)
    if known is not None and not (known.is_float and op in _BITWISE):
        return tensor, known, op
    if dtype is torch.bool and op in _BOOL_OPS:
        return tensor.view(torch.uint8), DType.UINT8, _BOOL_OPS[op]
    if dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.AVG):
        real = torch.view_as_real(tensor)
        if real.dtype in DTYPES:
            return real, DTYPES[real.dtype], op
    raise ArgumentError(
        f"{op.name} is not defined for {dtype}; accepted are integers, float16, bfloat16, float32, "
        "float64 (no bitwise operations on floats), bool without AVG, complex with SUM and AVG"
    )

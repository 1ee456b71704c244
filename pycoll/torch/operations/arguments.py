"""The arguments of a call: checked before a byte is moved, and what a rank contributes of them.

The engine takes addresses: it would read or write behind the end of a tensor that is too short.
The functions raise `ArgumentError` for arguments that do not fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pycoll.errors import ArgumentError
from pycoll.runtime.arrays.symmetric_memory import Memory
from pycoll.torch.tensors.layout import (
    Reduction,
    Tensors,
    as_reducible,
    check,
    check_output,
    empty_beside,
)


def single(tensors: Tensors, what: str) -> torch.Tensor:
    """Return the only tensor of a list."""
    if len(tensors) != 1:
        raise ArgumentError(f"{what}: {len(tensors)} tensors, expected one: a rank has one device")
    return tensors[0]


def root_of(opts: Any, n: int) -> int:
    """Return the root that a call names."""
    if not 0 <= opts.rootRank < n:
        raise ArgumentError(f"root {opts.rootRank} is not a rank; accepted: 0 to {n - 1}")
    return opts.rootRank


def check_count(parts: Tensors, n: int, what: str) -> None:
    """Refuse a list that does not have one tensor for each rank."""
    found = f"has {len(parts)} tensors" if parts else "is empty"
    if len(parts) != n:
        raise ArgumentError(f"{what} {found}, expected {n}: one for each rank")


def check_list(
    parts: Tensors,
    n: int,
    like: torch.Tensor,
    what: str,
    equal: bool = False,
    output: bool = False,
) -> None:
    """Refuse a list without a tensor for each rank; they have the type of one (`equal`: size)."""
    check_count(parts, n, what)
    for rank, part in enumerate(parts):
        (check_output if output else check)(part, f"tensor {rank} of {what}")
        if part.dtype != like.dtype:
            raise ArgumentError(f"{what}: tensor {rank} is {part.dtype}, expected {like.dtype}")
        if equal and part.numel() != like.numel():
            raise ArgumentError(
                f"{what}: tensor {rank} has {part.numel()} elements, expected {like.numel()}"
            )


def check_same_size(tensor: torch.Tensor, what: str, other: torch.Tensor, which: str) -> None:
    """Refuse a tensor that is not as large as another one, which will be copied there or back."""
    if tensor.numel() != other.numel():
        raise ArgumentError(
            f"{what} has {tensor.numel()} elements, expected {other.numel()}: as many as {which}"
        )


def is_share(share: torch.Tensor, whole: torch.Tensor, n: int) -> bool:
    """Whether a tensor has the size and type of `n` blocks like another one."""
    return whole.numel() == n * share.numel() and whole.dtype is share.dtype


def check_share(share: torch.Tensor, whole: torch.Tensor, n: int, names: tuple[str, str]) -> None:
    """Refuse a tensor that does not have the size and type of `n` blocks like another one."""
    if not is_share(share, whole, n):
        raise ArgumentError(
            f"{names[1]} has {whole.numel()} elements of {whole.dtype}, {names[0]} "
            f"{share.numel()} of {share.dtype}; expected {n} times as many of the same type"
        )


def pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of a coalesced call, each with its input."""
    if not outputs or len(outputs) != len(inputs):
        raise ArgumentError(
            f"{len(outputs)} outputs and {len(inputs)} inputs: expected as many, or there are "
            "no tensors"
        )
    return list(zip(outputs, inputs, strict=True))


def columns(outputs: list[Tensors], inputs: Tensors, n: int) -> list[tuple[Tensors, torch.Tensor]]:
    """Return for each input its outputs, one for each rank, from a list of outputs by rank."""
    check_count(outputs, n, "the list of outputs")
    for rank, row in enumerate(outputs):
        if not inputs or len(row) != len(inputs):
            raise ArgumentError(
                f"row {rank} of the outputs has {len(row)} tensors, expected {len(inputs)}: one "
                "for each input, of which there must be some"
            )
    return [(list(column), x) for *column, x in zip(*outputs, inputs, strict=True)]


def block_bytes(tensor: torch.Tensor, splits: list[int], n: int, what: str) -> list[int]:
    """Return the bytes of the block for each rank: `splits` in rows, or equal blocks if empty."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits and rows % n:
        raise ArgumentError(f"dim 0 of the {what} is {rows}, not a multiple of {n} ranks")
    splits = splits or [rows // n] * n
    if len(splits) != n or min(splits) < 0 or sum(splits) != rows:
        raise ArgumentError(
            f"{what} split sizes {splits}: expected {n} sizes that add up to {rows}"
        )
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return [row * split for split in splits]


def are_blocks(output: torch.Tensor, x: torch.Tensor, n: int) -> bool:
    """Whether two tensors have `n` equal blocks of rows each, and as many elements of one type."""
    return (
        output.numel() == x.numel()
        and output.dtype is x.dtype
        and bool(output.dim() and x.dim())
        and not (output.shape[0] % n or x.shape[0] % n)
    )


def contribution(x: torch.Tensor, how: Reduction, memory: Memory | None) -> torch.Tensor:
    """Return what a rank puts into a reduction: its elements, or a multiple of them.

    The multiple lies in symmetric memory, if there is some, and if the elements do.
    """
    as_reducible(x, how.op)  # raises here rather than after other tensors were sent
    if how.factor is None:
        return x
    factor, own = _factor(x, how.factor), empty_beside(x, memory)
    if x.is_floating_point() and x.itemsize == 1:  # which PyTorch does not multiply
        return own.copy_(x.float() * factor)
    return torch.mul(x, factor, out=own)


def _factor(x: torch.Tensor, factor: float | torch.Tensor) -> complex:
    """Return the factor of a PREMUL_SUM as a number that does not change the type of `x`."""
    number = factor.item() if isinstance(factor, torch.Tensor) else factor
    if isinstance(number, complex):
        fits = x.is_complex()
    elif x.is_floating_point() or x.is_complex():
        fits = True
    else:
        low, high = False, True
        if x.dtype is not torch.bool:
            low, high = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        fits = low <= number <= high and number == int(number)
        number = type(low)(number) if fits else number
    if not fits:
        raise ArgumentError(
            f"the factor {number} of PREMUL_SUM is not a number of type {x.dtype}; expected one "
            "that is: multiply the result, or reduce a tensor of another type"
        )
    return number


def unwritten(inputs: Tensors, outputs: list[Tensors], memory: Memory | None) -> Tensors:
    """Return the inputs of the parts of a call, with copies of those that earlier parts overwrite.

    Args:
        inputs: Of the parts in their order, contiguous.
        outputs: What each of these parts writes to.
        memory: Where symmetric tensors are, if there are any.
    """
    if len(inputs) < 2:
        return inputs
    spans = [(*_span(x), len(inputs), i) for i, x in enumerate(inputs)]
    spans += [(*_span(out), i, -1) for i, parts in enumerate(outputs) for out in parts]
    result = list(inputs)
    for cluster in _clusters(sorted(span for span in spans if span[0] < span[1])):
        first = min(writer for _, _, writer, _ in cluster)
        for *_, i in cluster:
            if i > first:
                result[i] = empty_beside(inputs[i], memory).copy_(inputs[i])
    return result


def _clusters(spans: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Divide sorted stretches of memory into clusters that do not overlap each other."""
    clusters, reach = [], 0
    for span in spans:
        if span[0] >= reach:
            clusters.append([])
        clusters[-1].append(span)
        reach = max(reach, span[1])
    return clusters


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins in memory, and where its last element ends."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    steps = ((k - 1) * stride for k, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (sum(steps) + 1) * tensor.element_size()

"""What the arguments of a call have to be, beside each other, before a byte is moved.

The engine takes addresses: a tensor that is shorter than its call would be read or written behind
its end.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pycoll.errors import ArgumentError
from pycoll.schedule.language.collectives import COLLECTIVES, FULL
from pycoll.torch.calls.work import Tensors
from pycoll.torch.tensors.layout import check, check_output
from pycoll.types import Kind

_WHOLE = {
    Kind[name.upper()]: (promise.in_layout == FULL, promise.out_layout == FULL)
    for name, promise in COLLECTIVES.items()
}  # whether input and output hold the blocks of all ranks, or that of one


def single(tensors: Tensors, what: str) -> torch.Tensor:
    """Return the only tensor of a list.

    Raises:
        ArgumentError: If there are more, or none.
    """
    if len(tensors) != 1:
        raise ArgumentError(f"{what}: {len(tensors)} tensors, expected one: a rank has one device")
    return tensors[0]


def some(tensors: Tensors) -> Tensors:
    """Return the tensors of a coalesced call.

    Raises:
        ArgumentError: If there are none.
    """
    if not tensors:
        raise ArgumentError("there are no tensors; expected at least one")
    return tensors


def root_of(opts: Any, n: int) -> int:
    """Return the root that a call names.

    Raises:
        ArgumentError: If it is not a rank.
    """
    if not 0 <= opts.rootRank < n:
        raise ArgumentError(f"root {opts.rootRank} is not a rank; accepted: 0 to {n - 1}")
    return opts.rootRank


def check_count(parts: Tensors, n: int, what: str) -> None:
    """Refuse a list that does not have one tensor for each rank.

    Args:
        parts: The list.
        n: Number of ranks.
        what: What to call it.

    Raises:
        ArgumentError: If it is shorter or longer.
    """
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
    """Refuse a list that does not have one tensor for each rank, all of the same type.

    Args:
        parts: The list.
        n: Number of ranks.
        like: A tensor of the expected type.
        what: What to call the list.
        equal: They must be as large as `like`, too.
        output: They will be written to.

    Raises:
        ArgumentError: Naming the tensor.
    """
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
    """Refuse a tensor that is not as large as another one, which will be copied there or back.

    Raises:
        ArgumentError: Naming both.
    """
    if tensor.numel() != other.numel():
        raise ArgumentError(
            f"{what} has {tensor.numel()} elements, expected {other.numel()}: as many as {which}"
        )


def is_share(share: torch.Tensor, whole: torch.Tensor, n: int) -> bool:
    """Whether a tensor has room for `n` blocks as large as another one, of its type."""
    return whole.numel() == n * share.numel() and whole.dtype is share.dtype


def check_share(share: torch.Tensor, whole: torch.Tensor, n: int, told: tuple[str, str]) -> None:
    """Refuse a tensor that does not have room for `n` blocks as large as another one.

    Args:
        share: The block of one rank.
        whole: The blocks of all.
        n: Number of ranks.
        told: What to call the two.

    Raises:
        ArgumentError: Also if they differ in type.
    """
    if not is_share(share, whole, n):
        raise ArgumentError(
            f"{told[1]} has {whole.numel()} elements of {whole.dtype}, {told[0]} "
            f"{share.numel()} of {share.dtype}; expected {n} times as many of the same type"
        )


def pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of a coalesced call, each with its input.

    Raises:
        ArgumentError: If there are none, or not as many.
    """
    if not outputs or len(outputs) != len(inputs):
        raise ArgumentError(
            f"{len(outputs)} outputs and {len(inputs)} inputs: expected as many, or there are "
            "no tensors"
        )
    return list(zip(outputs, inputs, strict=True))


def columns(outputs: list[Tensors], inputs: Tensors, n: int) -> list[tuple[Tensors, torch.Tensor]]:
    """Return for each input the outputs of all ranks; they are given by rank.

    Raises:
        ArgumentError: If a rank has not one for each input, or there are no inputs.
    """
    check_count(outputs, n, "the list of outputs")
    for rank, row in enumerate(outputs):
        if not inputs or len(row) != len(inputs):
            raise ArgumentError(
                f"row {rank} of the outputs has {len(row)} tensors, expected {len(inputs)}: one "
                "for each input, of which there must be some"
            )
    return [(list(column), x) for *column, x in zip(*outputs, inputs, strict=True)]


def block_bytes(tensor: torch.Tensor, splits: list[int], n: int, what: str) -> list[int]:
    """Return the bytes of the block for each rank.

    Args:
        tensor: Has all blocks.
        splits: How many rows of dim 0 each block has; if empty, all are equal.
        n: Number of ranks.
        what: What to call the tensor.

    Raises:
        ArgumentError: If the blocks are not those of the tensor.
    """
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


def check_memory(
    kind: Kind, x: torch.Tensor | None, out: torch.Tensor | None, nbytes: int, n: int
) -> None:
    """Refuse memory that is not as large as what a call moves: the last look before the engine.

    Args:
        kind: The collective.
        x: This rank's input, if it has one.
        out: Memory for its output, if it has one.
        nbytes: Bytes of the blocks of all ranks together.
        n: Number of ranks.

    Raises:
        ArgumentError: If input or output is larger or smaller.
    """
    for tensor, whole, what in zip((x, out), _WHOLE[kind], ("input", "output"), strict=True):
        if tensor is not None and tensor.nbytes * (1 if whole else n) != nbytes:
            expected = nbytes if whole else f"{nbytes} / {n}"
            raise ArgumentError(
                f"{kind.name.lower()}: the {what} has {tensor.nbytes} bytes, expected {expected}"
            )

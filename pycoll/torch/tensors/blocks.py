"""Lists of tensors as one stretch of memory: where it comes from, and the ways in and out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from pycoll.torch.calls.work import Tensors
from pycoll.torch.tensors.layout import fill, source

if TYPE_CHECKING:
    from pycoll.torch.calls.prepare import Calls

_LARGE = 1 << 20  # bytes that allocators take from the system each time


def room(calls: Calls, like: torch.Tensor, count: int) -> torch.Tensor:
    """Return room for elements during a call.

    Large room is in the symmetric heap, whose pool keeps the pages of what is asked for again and
    again: fresh ones cost more than the call that fills them. Not where there are tensors of the
    user in symmetric memory, because then it counts where the rest of a call lies.

    Args:
        calls: Of the group that makes the call.
        like: A tensor of the same type and on the same device.
        count: Number of elements.
    """
    nbytes = count * like.element_size()
    if calls.direct and not calls.symmetric and nbytes >= _LARGE and like.is_cpu:
        with contextlib.suppress(MemoryError):
            return torch.from_numpy(calls.session.memory.empty(nbytes, np.uint8)).view(like.dtype)
    return like.new_empty(count)


def pack(calls: Calls, tensors: Tensors) -> torch.Tensor:
    """Copy tensors one behind the other."""
    parts = [source(tensor).reshape(-1) for tensor in tensors]
    whole = room(calls, parts[0], sum(part.numel() for part in parts))
    return torch.cat(parts, out=whole)


def deal(flat: torch.Tensor, tensors: Tensors) -> None:
    """Cut a flat tensor into pieces and copy them into tensors of the caller."""
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        fill(tensor, piece.view(tensor.shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a flat one of bytes.

    The stride of a tensor with one element may be anything, but a view of another type looks at it.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

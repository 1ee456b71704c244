"""Small tensors of a coalesced call, packed so that one call of the engine moves many of them.

What is packed follows from sizes and types, so it is the same on every rank. An element's sum does
not depend on where it lies, so packing changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pycoll.torch.tensors.layout import store
from pycoll.types import Kind

Part = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Contiguous input and output of a call, and the caller's tensor that gets the output."""

_SMALL, _MOST = 64 << 10, 4 << 20  # bytes of a tensor that is packed, and of a pack
PACKED = Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


class Alone:
    """A call for one part."""

    def __init__(self, part: Part) -> None:
        """Take the part."""
        self._x, self._out, self._tensor = part

    def ends(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return input and output of the call."""
        return self._x, self._out

    def finish(self, out: torch.Tensor | None) -> None:
        """Give the caller's tensor what has come."""
        if self._tensor is not None:
            store(out, self._tensor)


class Pack:
    """One call for several parts of a type."""

    def __init__(self, kind: Kind, n: int, parts: list[Part]) -> None:
        """Take the parts of a call among `n` ranks."""
        self._kind, self._parts = kind, parts
        self._given_rows = n if kind == Kind.REDUCE_SCATTER else 1
        self._rows = n if kind == Kind.ALL_GATHER else 1

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack the inputs, block by block; return input and output of the call."""
        x = torch.cat([x.reshape(self._given_rows, -1) for x, _, _ in self._parts], dim=1)
        if self._kind == Kind.ALL_REDUCE:
            return x, x
        return x, x.new_empty(sum(out.numel() for _, out, _ in self._parts))

    def finish(self, out: torch.Tensor) -> None:
        """Unpack the output."""
        buffers = [buffer.view(self._rows, -1) for _, buffer, _ in self._parts]
        pieces = out.view(self._rows, -1).split([b.shape[1] for b in buffers], dim=1)
        with torch.no_grad():
            torch._foreach_copy_(buffers, pieces)
        for _, buffer, tensor in self._parts:
            store(buffer, tensor)


def in_packs(kind: Kind, n: int, parts: Iterable[Part]) -> list[Alone | Pack]:
    """Return the calls to make for the parts of a coalesced call of a `PACKED` kind, in order."""
    packs: list[list[Part]] = []
    room, last = 0, None
    for part in parts:
        x, out, _ = part
        size = max(x.nbytes, out.nbytes)
        small = 0 < size <= _SMALL and x.is_cpu and x.dtype == out.dtype and x.dtype in _TYPES
        if small and x.dtype == last and size <= room:
            packs[-1].append(part)
        else:
            packs.append([part])
            room, last = _MOST, x.dtype if small else None
        room -= size
    return [Alone(p[0]) if len(p) == 1 else Pack(kind, n, p) for p in packs]

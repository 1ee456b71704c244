"""Gradients sent as 16-bit numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.channels import Channel, Pending
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.state.hook import Hook
from pycoll.parallel.state.layout import Layout


class Compress(Hook):
    """Sends gradients as float16 or bfloat16: half the bytes of float32.

    Each rank divides by the number of ranks before it rounds, so that a sum that fits stays finite;
    the sum is formed in float32 and rounded once (orders ``tree`` and ``rank``).
    """

    def __init__(self, dtype: str) -> None:
        """Choose the type: ``"float16"`` or ``"bfloat16"``."""
        if dtype not in ("float16", "bfloat16"):
            raise ArgumentError(f"dtype={dtype!r}; accepted are float16 and bfloat16")
        self.dtype: np.dtype[Any] = dtype_of(dtype)

    def _pack(self, data: Any, channel: Channel) -> Any:
        small = channel.empty(data.shape[0], self.dtype, "hook")
        small[...] = data / data.dtype.type(channel.world_size)
        return small

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        pending = channel.all_reduce(self._pack(data, channel), "gradient", order)
        return pending.then(lambda total: self._unpack(total, data, channel))

    def reduce_scatter(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.reduce_scatter` and `Hook.all_reduce`."""
        block = channel.empty(out.shape[0], self.dtype, "hook")
        small = self._pack(data, channel)
        pending = channel.reduce_scatter(small, block, "gradient", order)
        return pending.then(lambda total: self._unpack(total, out, channel))

    def _unpack(self, total: Any, out: Any, channel: Channel) -> Any:
        out[...] = total
        out *= out.dtype.type(channel.world_size)
        return out

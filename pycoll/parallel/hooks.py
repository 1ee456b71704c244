"""Communication hooks: what happens between a whole bucket and its sum over ranks.

`Hook` itself does what training without a hook does. Hooks that compress work on float32 or float64
buckets and keep what they need between steps in arrays of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.ledger import Channel, Pending
from pycoll.parallel.placement import Placed, Placement, own_block
from pycoll.parallel.precision import dtype_of
from pycoll.parallel.units import Layout


class Hook:
    """Reduces buckets as they are. Base class of the others.

    Ranks compare their hooks: class and public attributes. What differs between ranks, such as what
    has not been sent, is private (``_x``).

    Attributes:
        stages: ZeRO stages that it is for.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks.

        Args:
            key: Name that the bucket keeps from step to step.
            data: Flat gradient, ``[layout.padded]``; may be changed.
            layout: Where which parameter is.
            channel: The ranks.
            order: Order of the reduction.

        Returns:
            What waits for the sum, in the type and of the size of `data`.
        """
        start = Placed(data, Placement.PARTIAL, channel, "gradient")
        return start.to(Placement.REPLICATE, "gradient", order)

    def reduce_scatter(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; `out` takes this rank's block."""
        start = Placed(data, Placement.PARTIAL, channel, "gradient")
        return start.to(Placement.SHARD, "gradient", order, out)

    def take_block(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Reduce a bucket everywhere, then take this rank's block: for sums that come as a whole.

        It sends what `all_reduce` does. With stage 2 that is once for each micro-batch.
        """
        pending = self.all_reduce(key, data, layout, channel, order)

        def finish(total: Any) -> Any:
            out[...] = own_block(total, channel.rank, channel.world_size)
            return out

        return Then(pending, finish)

    def rescale(self, factor: float) -> None:
        """Hear that gradients will be `factor` times as large, as the loss scale has changed."""

    def state(self) -> dict[str, Any]:
        """Return the arrays that have to be in a checkpoint, by name."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take the arrays of a checkpoint."""


def unsent(owner: Hook, errors: dict[str, Any], key: str, data: Any, channel: Channel) -> Any:
    """Return what a hook has not sent of a bucket yet; zeros at first.

    Raises:
        ArgumentError: If it is that of another bucket, from a checkpoint of another run.
    """
    if key not in errors:
        errors[key] = channel.ledger.track(np.zeros_like(data), "hook")
    error = errors[key]
    if (error.shape, error.dtype) != (data.shape, data.dtype):
        raise ArgumentError(
            f"{type(owner).__name__} was given {error.dtype}{list(error.shape)} as what is unsent "
            f'of the bucket of {key}, which is {data.dtype}{list(data.shape)}; a saved "hook" '
            "fits the same mesh, bucket_bytes and precision only: drop it"
        )
    return error


def rescale_unsent(errors: dict[str, Any], factor: float) -> None:
    """Multiply what has not been sent; what becomes too large for its type stays the largest.

    An infinity would stay for ever: every later step would be skipped. From the largest number it
    falls with the loss scale.
    """
    if factor == 1:
        return
    for error in errors.values():
        limit = np.finfo(error.dtype).max
        with np.errstate(over="ignore"):
            error *= error.dtype.type(factor)
        np.clip(error, -limit, limit, out=error)


class Then(Pending):
    """A collective followed by work on its result, done by whoever waits."""

    def __init__(self, pending: Pending, finish: Any) -> None:
        self._pending, self._finish = pending, finish

    def done(self) -> bool:
        """Tell whether the collective has ended, without waiting."""
        return self._pending.done()

    def wait(self) -> Any:
        """Wait for the collective and do the work; once."""
        return self._finish(self._pending.wait())


class Compress(Hook):
    """Sends gradients as float16 or bfloat16: half the bytes of float32.

    Each rank divides by the number of ranks before it rounds, so that a sum that fits stays finite;
    the sum is formed in float32 and rounded once (orders ``tree`` and ``rank``).
    """

    def __init__(self, dtype: str) -> None:
        """Choose the type: ``"float16"`` or ``"bfloat16"``."""
        if dtype not in ("float16", "bfloat16"):
            raise ArgumentError(f"dtype={dtype!r}; accepted are float16 and bfloat16")
        self.dtype = dtype_of(dtype)

    def _pack(self, data: Any, channel: Channel) -> Any:
        small = channel.empty(data.shape[0], self.dtype, "hook")
        small[...] = data / data.dtype.type(channel.world_size)
        return small

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.all_reduce`."""
        pending = channel.all_reduce(self._pack(data, channel), "gradient", order)
        return Then(pending, lambda total: self._unpack(total, data, channel))

    def reduce_scatter(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks; see `Hook.reduce_scatter`."""
        block = channel.empty(out.shape[0], self.dtype, "hook")
        small = self._pack(data, channel)
        pending = channel.reduce_scatter(small, block, "gradient", order)
        return Then(pending, lambda total: self._unpack(total, out, channel))

    def _unpack(self, total: Any, out: Any, channel: Channel) -> Any:
        out[...] = total
        out *= out.dtype.type(channel.world_size)
        return out

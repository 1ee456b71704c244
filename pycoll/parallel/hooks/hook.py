"""Communication hooks: what happens between a whole bucket and its sum over ranks.

`Hook` itself does what training without a hook does. Hooks that compress work on float32 or float64
buckets and keep what they need between steps in arrays of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll.errors import ArgumentError
from pycoll.parallel.analysis.ledger import Channel, Pending
from pycoll.parallel.engine.precision import dtype_of
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import Placed, Placement, own_block


class Hook:
    """Reduces buckets as they are. Base class of the others.

    Ranks compare their hooks: class and public attributes. What differs between ranks, such as what
    has not been sent, is private (``_x``).

    Attributes:
        stages: ZeRO stages that it is for.
        devices: Where the gradients may be.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)
    devices: tuple[str, ...] = ("cpu", "cuda")

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

    def begin(self, factor: float) -> None:
        """Hear that a step begins; what an earlier one has left without `settle` was not taken.

        Args:
            factor: How many times as large gradients are as in the last step, by the loss scale.
        """

    def settle(self) -> None:
        """Hear that the step has been taken, on every rank."""

    def state(self) -> dict[str, Any]:
        """Return the arrays that have to be in a checkpoint, by name."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take the arrays of a checkpoint."""


class Kept:
    """Arrays that a hook keeps from step to step, by name: changes count once a step is taken.

    Only then do ranks agree that it is: one that found an infinity in its part of a layer, and one
    that has another part, would otherwise go on with different ones.

    Attributes:
        arrays: Those of the last step that was taken.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._next: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return what this step, or the last one taken, has made of an array; None at first."""
        return self._next.get(name, self.arrays.get(name))

    def put(self, name: str, array: Any) -> None:
        """Keep an array if the step is taken."""
        self._next[name] = array

    def drop(self) -> None:
        """Forget what this step has made."""
        self._next.clear()

    def settle(self) -> None:
        """Keep what this step has made."""
        self.arrays |= self._next
        self._next.clear()

    def unsent(self, owner: Hook, key: str, data: Any) -> Any:
        """Return what a hook has not sent of a bucket yet, not to be changed; zeros at first.

        Raises:
            ArgumentError: If it is that of another bucket, from a checkpoint of another run.
        """
        error = self.get(key)
        if error is None:
            return np.zeros_like(data)
        if (error.shape, error.dtype) != (data.shape, data.dtype):
            raise ArgumentError(
                f"{type(owner).__name__} was given {error.dtype}{list(error.shape)} as what is "
                f"unsent of the bucket of {key}, which is {data.dtype}{list(data.shape)}; a saved "
                '"hook" fits the same mesh, bucket_bytes and precision only: drop it'
            )
        return error

    def rescale(self, factor: float) -> None:
        """Multiply all arrays; what becomes too large for its type stays the largest.

        An infinity would stay for ever: every later step would be skipped. From the largest number
        it falls with the loss scale.
        """
        if factor == 1:
            return
        for array in self.arrays.values():
            limit = np.finfo(array.dtype).max
            with np.errstate(over="ignore"):
                array *= array.dtype.type(factor)
            np.clip(array, -limit, limit, out=array)


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

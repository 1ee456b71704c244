"""The contract of communication hooks, and the reduction without compression."""

from __future__ import annotations

from typing import Any

from pycoll.parallel.channels import Channel, Pending
from pycoll.parallel.state.layout import Layout
from pycoll.parallel.state.placement import Placed, Placement


class Hook:
    """Reduces gradients uncompressed; base class of compressing hooks.

    Ranks compare their hooks: class and public attributes. Attributes that differ between ranks,
    such as gradients that were not sent, are private (``_x``).

    Attributes:
        stages: ZeRO stages that it supports.
        devices: Devices of gradients that it supports.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)
    devices: tuple[str, ...] = ("cpu", "cuda")

    def all_reduce(
        self, key: str, data: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket over the ranks.

        Args:
            key: Name of the bucket, the same in every step.
            data: Flat gradient, ``[layout.padded]``; may be changed.
            layout: Positions of the parameters in `data`.
            channel: The ranks.
            order: Order of the reduction.

        Returns:
            The pending sum, of the type and size of `data`.
        """
        start = Placed(data, Placement.PARTIAL, channel, "gradient")
        return start.to(Placement.REPLICATE, "gradient", order)

    def reduce_scatter(
        self, key: str, data: Any, out: Any, layout: Layout, channel: Channel, order: str
    ) -> Pending:
        """Start to add a bucket; ``out`` takes this rank's block. See `Hook.all_reduce`."""
        start = Placed(data, Placement.PARTIAL, channel, "gradient")
        return start.to(Placement.SHARD, "gradient", order, out)

    def begin(self, factor: float) -> None:
        """Begin a step; drop what an earlier step without `settle` has left: it was not taken.

        Args:
            factor: Loss scale of this step divided by that of the last one.
        """

    def settle(self) -> None:
        """Keep what this step has made: it has been taken, on every rank."""

    def state(self) -> dict[str, Any]:
        """Return the arrays that have to be in a checkpoint, by name."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take ``state``, the arrays of a checkpoint."""

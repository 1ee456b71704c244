"""The options of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.torch.errors import BackendArgumentError
from pycoll.types import Order

ORDERS = tuple(order.name.lower() for order in (Order.RANK, Order.TREE, Order.ANY))


@dataclass(frozen=True)
class Options:
    """What a group promises, as ``pg_options`` of ``init_process_group`` and ``new_group``.

    Attributes:
        order: How its reductions add up. ``"tree"`` is the in-order balanced tree over the ranks,
            ``"rank"`` the serial loop ``((0 + 1) + 2) + ...``; with both, the bits of an element
            depend on nothing but the elements of all ranks at its place. ``"any"`` is whatever is
            fastest: all ranks get the same bits, which may depend on the size of the call.
    """

    order: str = "tree"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            BackendArgumentError: For an order that is not known; it is a `ValueError`.
        """
        if self.order not in ORDERS:
            raise BackendArgumentError(
                f"order={self.order!r} is not known; accepted: {', '.join(map(repr, ORDERS))}"
            )


def order_of(options: Any) -> str:
    """Return the order that the ``pg_options`` of a group ask for."""
    if options is None:
        return Options.order
    if not isinstance(options, Options):
        raise ArgumentError(
            f"pg_options={options!r}; accepted: pycoll.torch.Options(order=...), or none"
        )
    return options.order


def check_equal(orders: list[str]) -> None:
    """Refuse a group whose ranks ask for different orders."""
    if len(set(orders)) > 1:
        said = ", ".join(f"rank {rank} {order!r}" for rank, order in enumerate(orders))
        raise ArgumentError(
            f"pg_options differ between ranks: order is {said}; pass the same on every rank"
        )

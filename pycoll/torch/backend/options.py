"""The options of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.torch.calls import cpp_futures
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
        cpp_hooks: Whether hooks in C++ may read the futures of this rank's calls. Futures of calls
            on CPU tensors then complete on PyTorch's inter-op threads, some 40 us later, and a
            callback must not wait for another call. Hooks in Python need no such futures, nor
            do DDP's built-in hooks.
    """

    order: str = "tree"
    cpp_hooks: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            BackendArgumentError: For an order that is not known, which is a `ValueError`, and
                without TorchScript for `cpp_hooks`.
        """
        if self.order not in ORDERS:
            raise BackendArgumentError(
                f"order={self.order!r} is not known; accepted: {', '.join(map(repr, ORDERS))}"
            )
        if self.cpp_hooks and (missing := cpp_futures.missing()):
            raise BackendArgumentError(f"cpp_hooks=True: {missing}")


def checked(options: Any) -> Options:
    """Return the ``pg_options`` of a group, or what holds without any."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise ArgumentError(
            f"pg_options={options!r}; accepted: pycoll.torch.Options(order=...), or none"
        )
    return options


def check_equal(orders: list[str]) -> None:
    """Refuse a group whose ranks ask for different orders."""
    if len(set(orders)) > 1:
        said = ", ".join(f"rank {rank} {order!r}" for rank, order in enumerate(orders))
        raise ArgumentError(
            f"pg_options differ between ranks: order is {said}; pass the same on every rank"
        )

"""Routes of a mixture of experts between ranks that exchange rows: they share no memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.inference.route_sums import add_up, check_results, check_routes, no_expert


@dataclass(frozen=True)
class MessageRoutes:
    """Which route is where; see `SharedRoutes` for the methods.

    Attributes:
        group: The group that they go through.
        counts: ``[E / n]``: how many rows each expert of this rank gets.
        sent: Rows from each rank to each, ``[n, n]``.
        by_expert: Positions of this rank's routes in the order in which they are sent.
        senders: The tokens of these routes.
        arrived: Positions of received rows in the order in which experts get them.
        returned, unsorted, departing: The inverses of the same: what goes back, and the positions
            of routes as they come back, and of rows as they leave.
        tokens: How many tokens this rank has, and experts a token.
    """

    group: ProcessGroupPycoll
    counts: torch.Tensor
    sent: np.ndarray
    by_expert: torch.Tensor
    senders: torch.Tensor
    arrived: torch.Tensor
    returned: np.ndarray
    unsorted: torch.Tensor
    departing: torch.Tensor
    tokens: tuple[int, int]

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Send every token to its experts."""
        return self._send(x, self.senders)

    def there_each(self, rows: torch.Tensor) -> torch.Tensor:
        """Send a row for each route."""
        return self._send(rows, self.by_expert)

    def _send(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        make = lambda: x.index_select(0, places)  # noqa: E731
        came = self.group.exchange_made("dispatch", make, self.sent)
        return came.index_select(0, self.arrived)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a row for each of this rank's routes."""

        def own() -> torch.Tensor:
            check_results(rows, len(self.arrived))
            return rows.index_select(0, self.departing)

        came = self.group.exchange_made("combine", own, self.returned)
        return came.index_select(0, self.unsorted).view(*self.tokens, rows.shape[1])

    def total(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the rows of each token."""
        return add_up(self.back(rows), weights).to(rows.dtype)


def by_messages(
    group: ProcessGroupPycoll,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
) -> MessageRoutes:
    """Let all ranks know how many rows go where."""
    n, rank = group.size(), group.rank()

    def routes() -> torch.Tensor:
        check_routes(x, ids, weights, num_experts, n)
        if ids.numel() and not 0 <= ids.min() <= ids.max() < num_experts:
            raise no_expert(num_experts)
        return torch.bincount(ids.reshape(-1).cpu(), minlength=num_experts).view(1, num_experts)

    table = group.gather_made("dispatch", routes).numpy().reshape(n, n, num_experts // n)
    by_expert = ids.reshape(-1).cpu().numpy().argsort(kind="stable")
    mine = table[:, rank]
    local = np.tile(np.arange(num_experts // n), n).repeat(mine.ravel())
    arrived = local.argsort(kind="stable")
    sent = table.sum(2).astype(np.uint64)
    places = by_expert, by_expert // max(1, ids.shape[1]), arrived
    there = sent, *(torch.from_numpy(p).to(x.device) for p in places)
    inverses = (torch.from_numpy(_inverse(p)).to(x.device) for p in (by_expert, arrived))
    counts = torch.from_numpy(mine.sum(0))
    back = np.ascontiguousarray(sent.T), *inverses
    return MessageRoutes(group, counts, *there, *back, tuple(ids.shape))


def _inverse(places: np.ndarray) -> np.ndarray:
    found = np.empty_like(places)
    found[places] = np.arange(len(places))
    return found

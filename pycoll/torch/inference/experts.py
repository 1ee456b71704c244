"""Mixtures of experts: tokens go to the ranks of their experts, and results come back.

A *route* is one token's way to one of its experts; it is a row on the wire. Rank r has the experts
``r * E / n`` to ``(r + 1) * E / n - 1`` of E, on n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycoll.errors import ArgumentError
from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.inference.ragged import Group, of_pycoll


@dataclass(frozen=True)
class Dispatched:
    """The rows that this rank's experts get, and the way back.

    Attributes:
        rows: ``[R, hidden]``: by expert; of one expert by the rank that sent them, then by token.
        counts: ``[E / n]``, int64: how many of them each expert of this rank gets.
        weights: ``[tokens, k]``: of this rank's tokens, for `combine`.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor
    _ways: _Ways


@dataclass(frozen=True)
class _Ways:
    """Which route is where.

    Attributes:
        group: The group that it goes through.
        sent: Rows from each rank to each, ``[n, n]``.
        by_expert: Positions of this rank's routes in the order in which they are sent.
        senders: The tokens of these routes.
        arrived: Positions of received rows in the order of `Dispatched.rows`.
        returned, unsorted, departing: The inverses of the same: what goes back, and the positions
            of routes as they come back, and of rows as they leave.
        tokens: How many tokens this rank has, and experts a token.
    """

    group: ProcessGroupPycoll
    sent: np.ndarray
    by_expert: torch.Tensor
    senders: torch.Tensor
    arrived: torch.Tensor
    returned: np.ndarray
    unsorted: torch.Tensor
    departing: torch.Tensor
    tokens: tuple[int, int]

    def there(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Send the rows of x at some places, in that order; return those of this rank's experts."""
        make = lambda: x.index_select(0, places)  # noqa: E731
        came = self.group.exchange_made("dispatch", make, self.sent)
        return came.index_select(0, self.arrived)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a row for each of this rank's routes, ``[tokens, k, hidden]``."""

        def own() -> torch.Tensor:
            if rows.dim() != 2 or len(rows) != len(self.arrived):
                raise ArgumentError(
                    f"y has shape {list(rows.shape)}; expected [{len(self.arrived)}, hidden], one "
                    "result for each row that was dispatched to this rank"
                )
            return rows.index_select(0, self.departing)

        came = self.group.exchange_made("combine", own, self.returned)
        return came.index_select(0, self.unsorted).view(*self.tokens, rows.shape[1])


def dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    group: Group = None,
) -> Dispatched:
    """Send every token to the ranks that have its experts; a collective with a gradient.

    Args:
        x: ``[tokens, hidden]``; the ranks may differ in the number of tokens.
        topk_ids: ``[tokens, k]``, integers: the experts of each token.
        topk_weights: ``[tokens, k]``: with which `combine` adds up their results.
        num_experts: E, a multiple of the number of ranks.
        group: By default the group of all ranks.

    Raises:
        BackendArgumentError: For shapes that do not fit, or an expert that there is not. The other
            ranks raise, too, and the group stays usable.
        DistBackendError: As collectives do.
    """
    ways, counts = _plan(of_pycoll(group), x, topk_ids, topk_weights, num_experts)
    return Dispatched(_There.apply(x, ways), counts, topk_weights, ways)


def combine(y: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
    """Return to every token the weighted sum of its experts' results; a collective with a gradient.

    The sum of a token is ``((w0 y0 + w1 y1) + w2 y2) + ...`` in the order of its row of
    ``topk_ids``, in float32 (float64 for float64), rounded once. So its bits depend on nothing but
    its results and weights.

    Args:
        y: ``[R, hidden]``: the results for `Dispatched.rows`, in their order.
        dispatched: What `dispatch` has returned.

    Returns:
        ``[tokens, hidden]``.

    Raises:
        BackendArgumentError: If there is not one result for each row.
        DistBackendError: As collectives do.
    """
    return _Back.apply(y, dispatched.weights, dispatched._ways)


def _plan(
    group: ProcessGroupPycoll,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
) -> tuple[_Ways, torch.Tensor]:
    """Let all ranks know how many rows go where."""
    n, rank = group.size(), group.rank()

    def routes() -> torch.Tensor:
        _check(x, ids, weights, num_experts, n)
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
    ways = _Ways(group, *there, np.ascontiguousarray(sent.T), *inverses, tuple(ids.shape))
    return ways, torch.from_numpy(mine.sum(0))


def _inverse(places: np.ndarray) -> np.ndarray:
    found = np.empty_like(places)
    found[places] = np.arange(len(places))
    return found


def _check(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, n: int
) -> None:
    if num_experts < 1 or num_experts % n:
        raise ArgumentError(f"num_experts={num_experts} is not a multiple of {n} ranks")
    if x.dim() != 2 or ids.dim() != 2 or len(ids) != len(x) or weights.shape != ids.shape:
        raise ArgumentError(
            f"x is {list(x.shape)}, topk_ids {list(ids.shape)}, topk_weights "
            f"{list(weights.shape)}; expected [tokens, hidden], [tokens, k] and [tokens, k]"
        )
    if ids.is_floating_point() or (ids.numel() and not 0 <= ids.min() <= ids.max() < num_experts):
        raise ArgumentError(f"topk_ids are no experts; accepted: integers, 0 to {num_experts - 1}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum(routes: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Add up the k rows of each token in their order, in a wide type."""
    wide = _wide(routes.dtype)
    parts = routes.to(wide)
    if weights is not None:
        parts = parts * weights.to(wide).unsqueeze(2)
    if not parts.shape[1]:
        return parts.sum(1)
    total = parts[:, 0].clone()
    for slot in range(1, parts.shape[1]):
        total.add_(parts[:, slot])
    return total


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: _Ways) -> torch.Tensor:
        ctx.ways = ways
        return ways.there(x, ways.senders)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(ctx.ways.back(grad.contiguous()), None).to(grad.dtype), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor, ways: _Ways) -> torch.Tensor:
        routes = ways.back(y.contiguous())
        ctx.ways = ways
        ctx.save_for_backward(routes, weights)
        return _sum(routes, weights).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        routes, weights = ctx.saved_tensors
        wide = _wide(routes.dtype)
        parts = grad[:, None].to(wide) * weights[:, :, None].to(wide)
        back = parts.to(routes.dtype).reshape(-1, routes.shape[2])
        of_weights = (grad[:, None].to(wide) * routes.to(wide)).sum(2).to(weights.dtype)
        return ctx.ways.there(back, ctx.ways.by_expert), of_weights, None

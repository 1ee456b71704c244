"""Mixtures of experts: tokens go to the ranks of their experts, and results come back.

A *route* is one token's way to one of its experts; it is a row on the wire. Rank r has the experts
``r * E / n`` to ``(r + 1) * E / n - 1`` of E, on n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.inference.message_routes import MessageRoutes, by_messages
from pycoll.torch.inference.ragged import Group, of_pycoll
from pycoll.torch.inference.route_sums import add_up, wide
from pycoll.torch.inference.shared_routes import SharedRoutes, by_shared_memory


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
    _ways: SharedRoutes | MessageRoutes


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
    rows, ways = _routes(of_pycoll(group), x, topk_ids, topk_weights, num_experts)
    if x.requires_grad and torch.is_grad_enabled():
        rows = _There.apply(x, rows, ways)
    return Dispatched(rows, ways.counts, topk_weights, ways)


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
    weights, ways = dispatched.weights, dispatched._ways
    if torch.is_grad_enabled() and (y.requires_grad or weights.requires_grad):
        return _Back.apply(y, weights, ways)
    return ways.total(y, weights)


def _routes(
    group: ProcessGroupPycoll, x: torch.Tensor, *routes: Any
) -> tuple[torch.Tensor, SharedRoutes | MessageRoutes]:
    """Send every token to its experts; return what this rank's experts get, and the way back."""
    with torch.no_grad():
        if group.heap is not None and x.is_cpu:
            return by_shared_memory(group, x, *routes)
        ways = by_messages(group, x, *routes)
        return ways.there(x), ways


class _There(torch.autograd.Function):
    """Has the gradient of what was sent already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, ways: Any) -> torch.Tensor:
        ctx.ways = ways
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ways.total(grad.contiguous(), None), None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor, ways: Any) -> torch.Tensor:
        ctx.ways, ctx.like = ways, (y.dtype, y.shape[1:])
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(weights)
            return ways.total(y, weights)
        routes = ways.back(y)
        ctx.save_for_backward(weights, routes)
        return add_up(routes, weights).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        weights, *routes = ctx.saved_tensors
        dtype, hidden = ctx.like
        parts = grad[:, None].to(wide(dtype)) * weights[:, :, None].to(wide(dtype))
        back = ctx.ways.there_each(parts.to(dtype).reshape(-1, *hidden))
        if not routes:
            return back, None, None
        of_weights = (grad[:, None].to(wide(dtype)) * routes[0].to(wide(dtype))).sum(2)
        return back, of_weights.to(weights.dtype), None

"""What both ways of the rows of a mixture of experts check and add up."""

from __future__ import annotations

import torch

from pycoll.errors import ArgumentError


def check_routes(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, n: int
) -> None:
    """Refuse arguments of `dispatch` that do not fit each other; each way looks at experts."""
    if num_experts < 1 or num_experts % n:
        raise ArgumentError(f"num_experts={num_experts} is not a multiple of {n} ranks")
    if x.dim() != 2 or ids.dim() != 2 or len(ids) != len(x) or weights.shape != ids.shape:
        raise ArgumentError(
            f"x is {list(x.shape)}, topk_ids {list(ids.shape)}, topk_weights "
            f"{list(weights.shape)}; expected [tokens, hidden], [tokens, k] and [tokens, k]"
        )
    if ids.is_floating_point():
        raise no_expert(num_experts)


def no_expert(num_experts: int) -> ArgumentError:
    """Return the error of an expert that there is not."""
    return ArgumentError(f"topk_ids are no experts; accepted: integers, 0 to {num_experts - 1}")


def check_results(rows: torch.Tensor, expected: int) -> None:
    """Refuse results of experts that are not one for each row."""
    if rows.dim() != 2 or len(rows) != expected:
        raise ArgumentError(
            f"y has shape {list(rows.shape)}; expected [{expected}, hidden], one result for each "
            "row that was dispatched to this rank"
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which rows of a type are added up."""
    return torch.promote_types(dtype, torch.float32)


def add_up(routes: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Add up the k rows of each token, ``[tokens, k, hidden]``, in their order, in a wide type."""
    parts = routes.to(wide(routes.dtype))
    if weights is not None:
        parts = parts * weights.to(parts.dtype).unsqueeze(2)
    if not parts.shape[1]:
        return parts.sum(1)
    total = parts[:, 0].clone()
    for slot in range(1, parts.shape[1]):
        total.add_(parts[:, slot])
    return total

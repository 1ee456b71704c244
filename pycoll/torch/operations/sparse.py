"""Sums of sparse tensors, as DDP makes them of gradients of ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pycoll.errors import ArgumentError
from pycoll.torch.tensors.layout import as_reducible
from pycoll.types import ReduceOp

_MAX_DIMS = 16
Gather = Callable[[torch.Tensor], torch.Tensor]  # from a tensor of each rank to all, by rank


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether `summed` takes a tensor."""
    return tensor.layout is torch.sparse_coo and tensor.is_cpu


def coalesced(tensor: torch.Tensor, op: ReduceOp, factor: object) -> torch.Tensor:
    """Return this rank's elements, each index once; refuse what cannot be summed."""
    if op is not ReduceOp.SUM or factor is not None:
        raise ArgumentError("sparse tensors can only be combined with SUM; reduce x.to_dense()")
    if tensor._is_view() and tensor._base.is_complex():
        raise ArgumentError(
            "the sparse tensor is complex; PyTorch passes on a copy that is real, so the result "
            "would be lost: reduce x.to_dense()"
        )
    if tensor.dim() > _MAX_DIMS:
        raise ArgumentError(f"a sparse tensor has {tensor.dim()} dims; accepted: {_MAX_DIMS}")
    mine = tensor.detach().coalesce()
    as_reducible(mine.values(), op)
    return mine


def summed(mine: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Return the sum of `coalesced` tensors, the same bits on each rank.

    `gather` exchanges contiguous tensors of one size. If shapes differ, all ranks raise.
    """
    form = [mine.sparse_dim(), *mine.shape]
    facts = [mine._nnz(), *form, *[-1] * (_MAX_DIMS + 1 - len(form))]
    counts, *forms = gather(torch.tensor(facts)).t().tolist()
    for rank, theirs in enumerate(zip(*forms, strict=True)):
        if list(theirs) != facts[1:]:
            sparse, *shape = (k for k in theirs if k >= 0)
            raise ArgumentError(
                f"rank {rank} has a sparse tensor of shape {shape} with {sparse} sparse dims, this "
                f"rank one of {form[1:]} with {form[0]}; expected the same on all"
            )
    places = _gathered(mine.indices().t(), counts, gather)
    values = _gathered(mine.values(), counts, gather)
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # rounded once
    whole = torch.sparse_coo_tensor(places.t(), values, mine.shape, check_invariants=False)
    return whole.coalesce().to(mine.dtype)


def _gathered(rows: torch.Tensor, counts: list[int], gather: Gather) -> torch.Tensor:
    """Return the rows of all ranks, one behind the other."""
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    return torch.cat([part[:k] for part, k in zip(gather(padded), counts, strict=True)])

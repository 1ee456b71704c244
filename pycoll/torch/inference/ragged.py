"""all_gatherv, reduce_scatterv and all_to_allv of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.errors import BackendArgumentError
from pycoll.torch.operations.ragged import Rows
from pycoll.torch.tensors.layout import reduction

Group = dist.ProcessGroup | None


def of_pycoll(group: Group) -> ProcessGroupPycoll:
    """Return a process group, by default that of all ranks, if it is one of this backend.

    Raises:
        BackendArgumentError: If it is of another backend.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroupPycoll):
        raise BackendArgumentError(
            f"group is {type(found).__name__}; expected one of the backend 'pycoll': "
            "dist.new_group(ranks, backend='pycoll') makes one"
        )
    return found


def all_gatherv(
    x: torch.Tensor,
    sizes: Rows | None = None,
    *,
    dim: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Return the tensors of all ranks, one behind the other along a dimension.

    Args:
        x: This rank's tensor; the ranks may differ in the length of `dim` only.
        sizes: These lengths, ``[world_size]``, the same on every rank. Without it the ranks
            exchange them, which takes a second, small call.
        dim: The dimension.
        group: By default the group of all ranks.
        timeout: Seconds; by default the group's.

    Raises:
        BackendArgumentError: If the sizes do not fit the input.
        DistBackendError: As collectives do, also if ranks were given different sizes.
    """
    found = of_pycoll(group).all_gatherv(x.movedim(dim, 0), sizes, timeout)
    return found.movedim(0, dim)


def reduce_scatterv(
    x: torch.Tensor,
    sizes: Rows | None = None,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    *,
    dim: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Combine the tensors of all ranks; rank r gets the next ``sizes[r]`` along a dimension.

    Args:
        x: A tensor of the same shape on every rank.
        sizes: The lengths of the shares, ``[world_size]``, the same on every rank; by default
            equal ones. They are compared, not exchanged.
        op: The operation. Sums are in the order of the group: `pycoll.torch.Options`.
        dim: The dimension.
        group: See `all_gatherv`.
        timeout: See `all_gatherv`.

    Raises:
        BackendArgumentError: If the sizes do not add up to the length of `dim`.
        DistBackendError: As collectives do, also if ranks were given different sizes.
    """
    opts = c10d.AllreduceOptions()
    opts.reduceOp = op  # which makes PyTorch's constants operations
    how = reduction(opts.reduceOp)
    if how.factor is not None:
        raise BackendArgumentError("PREMUL_SUM: multiply x by the factor instead")
    found = of_pycoll(group).reduce_scatterv(x.movedim(dim, 0), sizes, how.op, timeout)
    return found.movedim(0, dim)


def all_to_allv(
    x: torch.Tensor,
    sizes: Rows | Sequence[Rows],
    *,
    group: Group = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Send rows to every rank, and return the rows from each, by rank.

    Args:
        x: ``[rows, ...]``: the rows for rank 0, then those for rank 1, and so on.
        sizes: How many rows go to each rank, ``[world_size]``; the ranks exchange that in a second,
            small call. Or how many go from each rank to each, ``[world_size, world_size]``, the
            same on every rank: then nothing is exchanged.
        group: See `all_gatherv`.
        timeout: See `all_gatherv`.

    Raises:
        BackendArgumentError: If the sizes do not fit the input.
        DistBackendError: As collectives do, also if ranks were given different sizes.
    """
    return of_pycoll(group).all_to_allv(x, sizes, timeout)

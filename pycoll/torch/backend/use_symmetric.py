"""Gradients and parameters of DDP and FSDP2 in symmetric memory: they move with fewer copies."""

import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycoll.torch.backend.group import ProcessGroupPycoll

LEAST_BYTES = 64 << 10


def use_symmetric_memory(module: torch.nn.Module) -> torch.nn.Module:
    """Let a wrapped module keep in symmetric memory what its ranks exchange.

    For a `DistributedDataParallel` these are the gradient buckets. They keep their addresses: the
    first reduction moves their memory, and the first call of the group after the module was
    collected moves it back. For a module that ``fully_shard`` was called on these are the buffers
    of parameters and gradients, which then come from the process group. All ranks must do the same.
    If the number of ranks is no power of two, means of gradients are rounded once more or less;
    otherwise results do not change.

    Args:
        module: The module; DDP without another communication hook.

    Returns:
        The module.

    Raises:
        ValueError: If it is neither, or its process group is not of pycoll.
        RuntimeError: If this PyTorch cannot do it for FSDP2, or DDP has another hook.
    """
    if isinstance(module, DistributedDataParallel):
        group = module.process_group
        if not isinstance(group, ProcessGroupPycoll):
            backend = dist.get_backend(group)
            raise ValueError(f"the process group is of {backend}, not of pycoll")
        buckets = Buckets(group)
        module.register_comm_hook(buckets, reduce_in_place)
        weakref.finalize(module, buckets.release).atexit = False
        return module
    sharded = [m for m in module.modules() if hasattr(m, "set_reshard_after_forward")]
    if not sharded:
        raise ValueError(f"{type(module).__name__} was not wrapped by DDP or fully_shard")
    for part in sharded:
        enable = getattr(part, "set_allocate_memory_from_process_group_for_comm", None)
        if enable is None:
            raise RuntimeError(f"PyTorch {torch.__version__} allocates FSDP2's buffers itself")
        enable(True)
    return module


class Buckets:
    """The gradient buckets of a DDP module that are in symmetric memory."""

    def __init__(self, group: ProcessGroupPycoll) -> None:
        """Begin with none."""
        self.group = group
        self._known: dict[int, torch.Tensor] = {}

    def take(self, index: int, bucket: torch.Tensor) -> None:
        """Move a bucket there unless it is; DDP makes new ones after the first step."""
        known = self._known.get(index)
        if known is not None and known.data_ptr() == bucket.data_ptr():
            return
        if known is not None:
            self.group.deregister_tensor(self._known.pop(index))
        if bucket.nbytes >= LEAST_BYTES:
            self.group.register_tensor(bucket)
            self._known[index] = bucket

    def release(self) -> None:
        """Let a later call move all of them back; may be called by a finalizer."""
        while self._known:
            self.group.deregister_later(self._known.popitem()[1])


# DDP looks at the annotations, so this file has no postponed ones.
def reduce_in_place(
    buckets: Buckets, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks; DDP's communication hook."""
    gradients, how = bucket.buffer(), dist.ReduceOp.AVG
    if gradients.is_sparse:  # these have no bucket, and can only be summed
        gradients.div_(buckets.group.size())
        how = dist.ReduceOp.SUM
    else:
        buckets.take(bucket.index(), gradients)
    work = dist.all_reduce(gradients, how, group=buckets.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

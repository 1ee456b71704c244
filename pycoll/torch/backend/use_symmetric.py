"""Gradients and parameters of DDP and FSDP2 in symmetric memory: they move with fewer copies."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.backend.patches import do_not_compile, replace, trainers

LEAST_BYTES = 64 << 10
_HEAP_SHARE = 4  # of the heap gradients may take a fourth; old and new buckets are there together
_served: weakref.WeakKeyDictionary[dist.Reducer, "Buckets"] = weakref.WeakKeyDictionary()
"""The buckets of modules that `serve_ddp` serves."""


def use_symmetric_memory(module: torch.nn.Module) -> torch.nn.Module:
    """Let a wrapped module keep in symmetric memory what its ranks exchange.

    For a `DistributedDataParallel` these are the gradient buckets. They keep their addresses: the
    first reduction moves their memory, and the first call of the group after the module was
    collected moves it back. For a module that ``fully_shard`` was called on these are the buffers
    of parameters and gradients, which then come from the process group. All ranks must do the same.
    If the number of ranks is no power of two, means of gradients are rounded once more or less;
    otherwise results do not change. `serve_ddp` does it for DDP by itself.

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
        ours = _served.get(module.reducer)
        if ours is None or ours.instead is not None:
            module.register_comm_hook(_buckets_of(module), reduce_in_place)
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


def serve_ddp() -> None:
    """Let DDP modules keep their buckets in symmetric memory by themselves; harmless if repeated.

    That begins with their first step, so that a program can register a communication hook before.
    A hook that comes later takes the place of ours.
    """

    def begin(plain: Callable) -> Callable:
        def pre_forward(module: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if module.reducer not in _served and _is_wanted(module):
                buckets = _served[module.reducer] = _buckets_of(module)
                dist._register_comm_hook(module.reducer, buckets, reduce_in_place)
            return plain(module, *inputs, **kwargs)

        do_not_compile(pre_forward)
        return pre_forward

    def register(plain: Callable) -> Callable:
        def register_comm_hook(module: DistributedDataParallel, state: Any, hook: Callable) -> None:
            buckets = _served.get(module.reducer)
            if buckets is None or buckets.instead is not None:
                plain(module, state, hook)
                return
            module._check_comm_hook(hook)
            module._comm_hooks.append((hook, state))
            buckets.instead = hook, state
            buckets.release()

        return register_comm_hook

    replace(DistributedDataParallel, "_pre_forward", begin)
    replace(DistributedDataParallel, "register_comm_hook", register)


def _is_wanted(module: DistributedDataParallel) -> bool:
    """Whether to begin with this step; the answer is the same on every rank."""
    group = module.process_group
    if (
        not isinstance(group, ProcessGroupPycoll)
        or not torch.is_grad_enabled()
        or not module.require_backward_grad_sync
        or module._comm_hooks
        or module._join_config.enable  # ranks that have joined take no steps
        or getattr(module, "_use_python_reducer", False)
        or group.size() == 1
        or not group._caller.calls.direct
        or group._caller.for_cpp  # hooks in C++ are not seen from here
    ):
        return False
    config, trained = group._caller.session.config, module._module_parameters
    if not config.ddp_symmetric or not all(p.is_cpu for p in trained):
        return False
    return _HEAP_SHARE * sum(p.nbytes for p in trained) <= config.heap_bytes


def _buckets_of(module: DistributedDataParallel) -> "Buckets":
    buckets = Buckets(module.process_group, module)
    weakref.finalize(module, buckets.release).atexit = False
    return buckets


class Buckets:
    """The gradient buckets of a DDP module that are in symmetric memory.

    Attributes:
        group: The module's process group.
        instead: The program's own hook, with its state, if it came later.
    """

    def __init__(
        self, group: ProcessGroupPycoll, module: DistributedDataParallel | None = None
    ) -> None:
        """Begin with none."""
        self.group = group
        self.instead: Any = None
        self._known: dict[int, torch.Tensor] = {}
        self._module = (lambda: None) if module is None else weakref.ref(module)

    def trainers(self) -> int | None:
        """Return the number of ranks by which `join` divides, if that is not all of them."""
        module = self._module()
        if module is None or not module._join_config.enable:
            return None
        return None if module._divide_by_initial_world_size else trainers(module.reducer)

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
    if buckets.instead is not None:
        hook, state = buckets.instead
        return hook(state, bucket)
    gradients, how, ranks = bucket.buffer(), dist.ReduceOp.AVG, buckets.trainers()
    if gradients.is_sparse:  # these have no bucket, and can only be summed
        gradients.div_(ranks or buckets.group.size())
        how = dist.ReduceOp.SUM
    else:
        buckets.take(bucket.index(), gradients)
        if ranks is not None:
            gradients.mul_(1 / ranks)  # as DDP does
            how = dist.ReduceOp.SUM
    work = dist.all_reduce(gradients, how, group=buckets.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

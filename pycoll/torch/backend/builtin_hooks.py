"""Communication hooks of DDP that PyTorch has in C++, where futures of Python cannot be read."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from pycoll.torch.backend.core import Core

_METHOD = "_register_builtin_comm_hook"


def take_those_of_python() -> None:
    """Give models of our groups PyTorch's hooks in Python instead; harmless if repeated."""
    plain = getattr(DistributedDataParallel, _METHOD, None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def register(model: DistributedDataParallel, comm_hook_type: Any) -> None:
        if not isinstance(model.process_group, Core):
            plain(model, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
        model.register_comm_hook(model.process_group, hook)

    setattr(DistributedDataParallel, _METHOD, register)

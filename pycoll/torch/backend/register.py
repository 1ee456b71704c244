"""Making the backend known by its name, to PyTorch and to trainers.

Importing `pycoll.torch` calls `register`. So does PyTorch where pycoll is installed, by entry
points: of ``torch.backends`` when it is imported, in 2.15 of ``torch.distributed.backends``.
"""

from __future__ import annotations

import torch.distributed as dist

from pycoll.torch.backend.by_name import offer_to_accelerate, offer_to_ignite
from pycoll.torch.backend.group import ProcessGroupPycoll, create
from pycoll.torch.backend.patches import (
    keep_error_types,
    keep_works,
    offer_monitored_barrier,
    set_timeouts,
    shorten_all_reduce,
    use_python_hooks,
)
from pycoll.torch.tensors.devices import kinds

NAME = "pycoll"


def register() -> None:
    """Make ``"pycoll"`` known to ``torch.distributed``; done by the import, harmless if repeated.

    Raises:
        RuntimeError: If this PyTorch was built without ``torch.distributed``.
    """
    if not dist.is_available():
        raise RuntimeError("this PyTorch was built without torch.distributed")
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=kinds())
    keep_works()
    keep_error_types()
    set_timeouts(ProcessGroupPycoll)
    shorten_all_reduce(ProcessGroupPycoll)
    offer_monitored_barrier(ProcessGroupPycoll)
    use_python_hooks(ProcessGroupPycoll)
    offer_to_accelerate(NAME)
    offer_to_ignite(NAME)


def make_default(device: str = "cpu") -> None:
    """Use pycoll for a kind of device where no backend is named.

    It is what ``init_process_group()`` without a backend, ``init_device_mesh`` and trainers that
    ask PyTorch for the default take.

    Args:
        device: ``"cpu"``, or ``"cuda"`` where this PyTorch has CUDA.

    Raises:
        ValueError: For a device whose tensors pycoll does not move.
    """
    if device not in kinds():
        raise ValueError(f"device={device!r}; accepted: {', '.join(map(repr, kinds()))}")
    dist.Backend.default_device_backend_map[device] = NAME

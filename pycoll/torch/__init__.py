"""pycoll as a backend of ``torch.distributed``: ``init_process_group("pycoll")``.

Importing this module registers the backend for CPU tensors and, where PyTorch has CUDA, for those
of CUDA devices. `make_default` makes it what tensors use when no backend is named. What works is
listed in docs/torch.md.
"""

from __future__ import annotations

from pycoll.torch.backend.group import ProcessGroupPycoll
from pycoll.torch.backend.options import Options
from pycoll.torch.backend.register import NAME, make_default, register
from pycoll.torch.backend.use_symmetric import serve_ddp, use_symmetric_memory
from pycoll.torch.errors import BackendArgumentError, BackendTimeout

register()
serve_ddp()

__all__ = [
    "NAME",
    "BackendArgumentError",
    "BackendTimeout",
    "Options",
    "ProcessGroupPycoll",
    "make_default",
    "register",
    "use_symmetric_memory",
]

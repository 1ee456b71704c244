"""A process group of torchft, which makes a new group of pycoll at every change of the members."""

from __future__ import annotations

import torch.distributed as dist

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as _error:
    raise ImportError("pycoll.torch.torchft needs torchft: pip install torchft-nightly") from _error

from pycoll.torch.backend.group import ProcessGroupPycoll as Group
from pycoll.torch.backend.group import create


class ProcessGroupPycoll(ProcessGroupWrapper):
    """What a torchft ``Manager`` takes as ``pg``, in place of ``ProcessGroupGloo``."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> Group:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout, options.group_id = self._timeout, "torchft"
        options.global_ranks_in_group = list(range(world_size))
        return create(options)

    def getBackendName(self) -> str:
        """Return the name, for torchft."""
        return "torchft-pycoll"

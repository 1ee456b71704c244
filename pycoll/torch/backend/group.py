"""The process group of the backend, and how PyTorch makes one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pycoll.errors import CollError
from pycoll.runtime.sessions.session import Session
from pycoll.torch.backend.bootstrap import join
from pycoll.torch.backend.compiling import run_as_it_is
from pycoll.torch.backend.core import Core
from pycoll.torch.backend.errors import as_torch
from pycoll.torch.calls.fast_path import Hot
from pycoll.torch.calls.work import DoneWork, PendingWork
from pycoll.torch.operations.list_moves import ListMoves
from pycoll.torch.operations.moves import Moves
from pycoll.torch.operations.p2p import Messages, MessageWork
from pycoll.torch.operations.reductions import Reductions


class ProcessGroupPycoll(Reductions, Moves, ListMoves, Messages, Hot, Core):
    """A group of ranks that exchange tensors of CPUs or of CUDA devices through pycoll.

    Made by ``torch.distributed.init_process_group("pycoll")`` and ``new_group``. Synchronous calls
    run on the calling thread, asynchronous ones on a thread of the group, in the order in which
    they were made. Tensors that are not contiguous are packed and unpacked.

    Errors are `torch.distributed.DistBackendError` and carry pycoll's text: what was called where,
    by whom, and what to do.
    """

    def __init__(self, session: Session, store: dist.Store, name: str) -> None:
        """Wrap a session; see `create`."""
        super().__init__(session, store, name)
        self._open_hot()
        self._open_messages()

    def shutdown(self) -> None:
        """Finish what runs in the background and leave the group; harmless if repeated."""
        self._hot.clear()
        self._close_messages()
        super().shutdown()


run_as_it_is(ProcessGroupPycoll, DoneWork, PendingWork, MessageWork)


def create(options: Any, backend_options: Any = None) -> ProcessGroupPycoll:
    """Make a group; called by PyTorch on every rank of it.

    Args:
        options: PyTorch's description of the group: store, rank, size, timeout, name.
        backend_options: None; there are no options of our own.

    Raises:
        DistBackendError: If the group cannot be made, naming the ranks that are missing.
    """
    rank, size, name = options.group_rank, options.group_size, str(options.group_id)
    try:
        if backend_options is not None:
            raise CollError(f"pg_options={backend_options!r}; this backend has no options")
        limit, ranks = options.timeout.total_seconds(), options.global_ranks_in_group
        session = join(options.store, rank, size, limit, ranks)
    except CollError as error:
        raise as_torch(error, f"making group {name!r} on rank {rank} of {size}") from error
    return ProcessGroupPycoll(session, options.store, name)

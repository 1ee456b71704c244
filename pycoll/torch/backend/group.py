"""The process group of the backend, and how PyTorch makes one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pycoll.cuda import call_marks
from pycoll.errors import CollError
from pycoll.observe.attach import attach
from pycoll.runtime.sessions.reports import why_left
from pycoll.runtime.sessions.session import Session
from pycoll.torch.backend.bootstrap import join
from pycoll.torch.backend.options import Options, checked
from pycoll.torch.backend.patches import do_not_compile_methods
from pycoll.torch.calls.caller import Caller
from pycoll.torch.calls.work import DoneWork, PendingWork
from pycoll.torch.errors import as_torch
from pycoll.torch.operations.list_collectives import ListCollectives
from pycoll.torch.operations.p2p import ANY, Messages, MessageWork
from pycoll.torch.operations.ragged import RaggedCollectives
from pycoll.torch.tensors.devices import kinds
from pycoll.torch.tensors.layout import Tensors


class _StandIn(c10d.Backend):
    def name(self) -> str:
        return "pycoll"

    getBackendName = name


class ProcessGroupPycoll(RaggedCollectives, ListCollectives, dist.ProcessGroup):
    """A group of ranks that exchange tensors of CPUs or of CUDA devices through pycoll.

    Made by ``torch.distributed.init_process_group("pycoll")`` and ``new_group``. Synchronous calls
    run on the calling thread, asynchronous ones on a thread of the group, in the order in which
    they were made. Tensors that are not contiguous are packed and unpacked.

    Errors are `torch.distributed.DistBackendError` and carry pycoll's text: what was called where,
    by whom, and what to do. A wrong argument is a `BackendArgumentError`, raised for an
    ArgumentError of pycoll.

    PyTorch calls the methods with its own arguments: ``tensors``, ``output``, ``outputs``,
    ``input`` and ``inputs`` are tensors or lists of them, ``opts`` the options of the call (op,
    root, timeout), ``output_splits`` and ``input_splits`` rows for each rank, ``dst`` and ``src``
    ranks of this group, ``tag`` the tag of a message, ``x`` a tensor whose first dimension counts
    rows, ``op`` a `ReduceOp`, ``what`` the name of the call in errors.
    """

    def __init__(
        self, session: Session, store: dist.Store, name: str, options: Options | None = None
    ) -> None:
        """Wrap a session; see `create`."""
        super().__init__(session.rank, session.world_size)
        options = checked(options)
        self._caller = Caller(session, name, options.order, options.cpp_hooks)
        self._tables = {}
        self._messages = Messages(self._caller)
        self._store, self._desc, self._closed = store, "undefined", False
        self._stand_in()

    def _stand_in(self) -> None:
        """Register a backend without operations, which PyTorch 2.15 attaches its hooks to."""
        try:
            self._hooked = _StandIn(self.rank(), self.size())
        except TypeError:  # before 2.15
            return
        for device in self._device_types:
            self._register_backend(device, self.BackendType.CUSTOM, self._hooked)
        self._set_default_backend(self.BackendType.CUSTOM)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank."""
        return self._messages.post("send", tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receive a tensor of the same size and type from one rank."""
        return self._messages.post("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends first."""
        return self._messages.post("recv", tensors, ANY, tag)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Tell FSDP2 that `allocate_tensor` works for its buffers on a ``device``."""
        return self._caller.calls.direct and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: Any = "cpu"
    ) -> torch.Tensor:
        """Make a tensor (``size``, ``dtype``, ``device``) that all ranks of this host can reach.

        Collectives of this group move it with fewer copies, if every rank passes such tensors.

        Raises:
            MemoryError: If the machine or the heap has no room for it.
        """
        return self._caller.symmetric.empty(size, dtype)

    def register_tensor(self, tensor: torch.Tensor) -> None:
        """Move an existing ``tensor`` into symmetric memory, at its address; see docs/memory.md.

        Raises:
            DistBackendError: If its memory cannot be moved.
        """
        self._transfer("register", tensor)

    def deregister_tensor(self, tensor: torch.Tensor) -> None:
        """Move a registered ``tensor`` back."""
        self._transfer("unregister", tensor)

    def deregister_later(self, tensor: torch.Tensor) -> None:
        """Let the next call that is not a repeated one move a registered ``tensor`` back.

        For finalizers: the garbage collector may run them inside any call of this group.
        """
        self._caller.symmetric.leaving.append(tensor)

    def _transfer(self, how: str, tensor: torch.Tensor) -> None:
        self._caller.symmetric.move_back()
        try:
            self._caller.symmetric.transfer(how, tensor)
        except CollError as error:
            raise self._caller.error(error, f"{how}_tensor") from error

    # ---- what c10d asks of any group

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._caller.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._caller.size

    def name(self) -> str:
        """Return the name of the backend."""
        return "pycoll"

    getRank: Callable[[Any], int] = rank
    getSize: Callable[[Any], int] = size
    getBackendName: Callable[[Any], str] = name
    _get_backend_name = name

    @property
    def group_name(self) -> str:
        """Name by which functional collectives find the group."""
        return self._caller.name

    @property
    def group_desc(self) -> str:
        """Description that was given to ``new_group``."""
        return self._desc

    def getGroupName(self) -> str:
        """Return the name; for C++."""
        return self._caller.name

    def setGroupName(self, name: str) -> None:
        """Rename the group to ``name``."""
        self._caller.name = name

    def getGroupDesc(self) -> str:
        """Return the description; for C++."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Describe the group by ``desc``."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in kinds()]

    supports_splitting = False  # `split_group`; make groups with ``new_group``
    supports_shrinking = False  # `shrink_group`; after a failure start the ranks again
    supports_coalescing = False  # collecting single calls and running them together
    supports_time_estimate = False

    def _start_coalescing(self, device: Any) -> None:
        """Refuse to collect the calls of a device; PyTorch asks even if we do not support it.

        PyTorch notes before that calls of this group are collected. Were that left, later ones
        would do nothing, silently.
        """
        dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)
        raise RuntimeError(
            f"groups of pycoll do not collect calls of a device, here {device}; pass none to "
            "_coalescing_manager, which then makes one coalesced call"
        )

    @property
    def options(self) -> c10d.Backend.Options:
        """The timeout and the ranks of the group, as PyTorch's own backends have them."""
        options = c10d.Backend.Options(self.name(), timedelta(seconds=self._caller.timeout_s))
        if hasattr(options, "group_name"):  # from about PyTorch 2.9 on
            options.global_ranks_in_group = dist.get_process_group_ranks(self)
            options.group_name = self._caller.name
        return options

    def _get_backend(self, device: torch.device) -> ProcessGroupPycoll:
        if torch.device(device).type not in kinds():
            raise RuntimeError(
                f"no backend for {device} in this group; this pycoll moves tensors of "
                f"{' and '.join(kinds())}"
            )
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._caller.session.engine.iteration

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks count from the same number."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._caller.background.finish()

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time that calls wait for their peers."""
        self._caller.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish what runs in the background and leave the group; harmless if repeated.

        While an exception is handled, as in ``finally``, that is not waited for: the peers get it.
        """
        error = sys.exc_info()[1]
        if not self._closed and error is not None and self._caller.background.busy:
            with contextlib.suppress(CollError):  # the group has failed
                self._caller.session.abort(why_left(error))
        if not self._closed:
            self._closed = True
            self._messages.close()
            self._tables.clear()
            self._caller.close()

    def abort(self) -> None:
        """Make every rank's present or next call raise, and leave the group."""
        if not self._closed:
            self._caller.session.abort("abort was called on the process group")
            self.shutdown()


do_not_compile_methods(ProcessGroupPycoll, DoneWork, PendingWork, MessageWork)


def create(options: Any, backend_options: Any = None) -> ProcessGroupPycoll:
    """Make a group as PyTorch describes it; PyTorch calls this on every rank of it.

    Raises:
        DistBackendError: If the group cannot be made, naming the ranks that are missing.
        BackendArgumentError: If `backend_options` are no `Options`, or differ between ranks.
    """
    rank, size, name = options.group_rank, options.group_size, str(options.group_id)
    try:
        limit, ranks = options.timeout.total_seconds(), options.global_ranks_in_group
        session = join(options.store, rank, size, limit, ranks, backend_options)
        session.job_ranks = list(ranks) or None
        attach(session, call_marks, metrics=False)
    except CollError as error:
        raise as_torch(error, f"making group {name!r} on rank {rank} of {size}") from error
    return ProcessGroupPycoll(session, options.store, name, checked(backend_options))

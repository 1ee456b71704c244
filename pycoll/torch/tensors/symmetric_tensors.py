"""Symmetric memory of a process group: tensors made there, and tensors moved there and back."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycoll.errors import ArgumentError, CollError
from pycoll.runtime.sessions.session import Session
from pycoll.torch.calls.prepare import Calls
from pycoll.torch.tensors.blocks import as_bytes


class SymmetricTensors:
    """Mixed into a process group."""

    _calls: Calls
    _session: Session
    _lock: threading.RLock
    _error: Callable[[CollError, str], dist.DistBackendError]
    _wait_for_pending_works: Callable[[], None]

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Tell FSDP2 that `allocate_tensor` works, which its buffers can come from."""
        return self._calls.direct and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: Any = "cpu"
    ) -> torch.Tensor:
        """Make a tensor whose memory all ranks of this host can reach.

        Collectives of this group move it with fewer copies, if every rank passes such tensors.

        Raises:
            MemoryError: If the machine or the heap has no room for it.
        """
        shape = (size,) if isinstance(size, int) else tuple(size)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._calls.direct or nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._calls.symmetric = True
        block = self._session.memory.empty(nbytes, np.uint8)
        return torch.from_numpy(block).view(dtype).view(shape)

    def register_tensor(self, tensor: torch.Tensor) -> None:
        """Move an existing tensor into symmetric memory, where it lies; see docs/memory.md.

        Raises:
            DistBackendError: If its memory cannot be moved.
        """
        self._registering("register", tensor)

    def deregister_tensor(self, tensor: torch.Tensor) -> None:
        """Move a registered tensor back."""
        self._registering("unregister", tensor)

    def deregister_later(self, tensor: torch.Tensor) -> None:
        """Note a registered tensor, to be moved back by the next call that is not a repeated one.

        For finalizers: the garbage collector may run them inside any call of this group.
        """
        self._leaving.append(tensor)

    def _open_symmetric(self) -> None:
        self._leaving: deque[torch.Tensor] = deque()

    def _registering(self, how: str, tensor: torch.Tensor) -> None:
        self._move_back()
        try:
            self._transfer(how, tensor)
        except CollError as error:
            raise self._error(error, f"{how}_tensor") from error

    def _transfer(self, how: str, tensor: torch.Tensor) -> None:
        if not self._calls.direct:
            return  # messages between hosts need no such thing
        self._wait_for_pending_works()  # they may use it
        if not tensor.is_contiguous():
            raise ArgumentError("the tensor is not contiguous; only one stretch can be moved")
        flat = as_bytes(tensor.detach())
        with self._lock:
            getattr(self._session.memory, how)(flat)
        self._calls.symmetric = True

    def _move_back(self) -> None:
        """Move back what `deregister_later` has noted; what cannot be stays, which does no harm."""
        while self._leaving:
            with contextlib.suppress(Exception):
                self._transfer("unregister", self._leaving.popleft())

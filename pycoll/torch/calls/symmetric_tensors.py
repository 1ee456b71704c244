"""Symmetric memory of a process group: tensors made there, and tensors moved there and back."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from pycoll.errors import ArgumentError
from pycoll.torch.calls.background import Background
from pycoll.torch.calls.prepare import Calls
from pycoll.torch.tensors.layout import as_bytes


class SymmetricTensors:
    """The tensors of a process group in symmetric memory.

    Attributes:
        leaving: Registered tensors that `move_back` has to move back.
    """

    def __init__(self, calls: Calls, lock: threading.RLock, background: Background) -> None:
        """Serve a group; `lock` keeps other threads out of its session."""
        self._calls, self._lock, self._background = calls, lock, background
        self.leaving: deque[torch.Tensor] = deque()

    def empty(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor in symmetric memory; elsewhere between hosts."""
        shape = (size,) if isinstance(size, int) else tuple(size)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._calls.direct or nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._calls.symmetric = True
        block = self._calls.session.memory.empty(nbytes, np.uint8)
        return torch.from_numpy(block).view(dtype).view(shape)

    def transfer(self, how: str, tensor: torch.Tensor) -> None:
        """Move a tensor into symmetric memory (`how` is "register") or back ("unregister")."""
        if not self._calls.direct:
            return  # messages between hosts need no such thing
        self._background.finish()  # queued calls may use it
        if not tensor.is_contiguous():
            raise ArgumentError("the tensor is not contiguous; only one stretch can be moved")
        flat = as_bytes(tensor.detach())
        with self._lock:
            getattr(self._calls.session.memory, how)(flat)
        self._calls.symmetric = True

    def move_back(self) -> None:
        """Move back the leaving tensors; one that cannot be moved stays, which does no harm."""
        while self.leaving:
            with contextlib.suppress(Exception):
                self.transfer("unregister", self.leaving.popleft())

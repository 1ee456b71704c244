"""Futures that hooks in C++ can read: their value is a list of tensors, not an object of Python.

A future that Python makes has a value of Python's, and C++ fails where it looks for tensors. Only
TorchScript makes one of another type for Python: that of a function which it runs by itself.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch


def _after(call: torch.jit.Future[bool], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.jit.wait(call)
    return tensors


@cache
def _script() -> Any:
    """Compile `_after`; TorchScript gives its thread to others while it waits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        after = torch.jit.script(_after)

        def fork(
            call: torch.jit.Future[bool], tensors: list[torch.Tensor]
        ) -> torch.jit.Future[list[torch.Tensor]]:
            return torch.jit.fork(after, call, tensors)

        script = torch.jit.script(fork)
    return script


def missing() -> str:
    """Return what such futures lack here; nothing if they can be made."""
    compiled = isinstance(_script(), torch.jit.ScriptFunction)
    return "" if compiled else "PyTorch runs without TorchScript (PYTORCH_JIT=0)"


def tensors_after(call: torch.futures.Future, tensors: list[torch.Tensor]) -> Any:
    """Return a future of tensors that is complete, or fails, when that of a call is."""
    return _script()(call, tensors)

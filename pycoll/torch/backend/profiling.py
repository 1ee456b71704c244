"""Calls in the traces of ``torch.profiler``, which sees no call of a group that is in Python."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOTHING = nullcontext()


def profiling() -> bool:
    """Tell whether somebody records a trace."""
    return getattr(profiler, "_is_profiler_enabled", False)


def recorded(what: str) -> AbstractContextManager:
    """Put a call into the trace, if there is one, as ``pycoll:all_reduce``."""
    return profiler.record_function(f"pycoll:{what}") if profiling() else _NOTHING

"""What every operation of a process group does besides its own work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pycoll.torch.calls.caller import Caller, Job, Key
from pycoll.torch.tensors.layout import Tensors


class HasCaller(Protocol):
    """A process group, as its operations see it."""

    _caller: Caller


Repeated = tuple[Key, torch.Tensor | None, torch.Tensor] | None
"""What `Caller.repeat` takes; None if calls like it are not repeated."""
Like = Callable[[Caller, tuple], Repeated]
"""Finds that out for the arguments of an operation."""


def operation(what: str, options: type, like: Like | None = None) -> Callable:
    """Make a method that checks arguments, and returns a job with its result, an operation.

    The operation fills in missing options, makes the call, or repeats an earlier one, and ends the
    group if it is interrupted, wherever that is.

    Args:
        what: Its name, for messages.
        options: PyTorch's options for it, its last argument.
        like: See `Like`.
    """

    def make(prepare: Callable[..., tuple[Job, Tensors]]) -> Callable[..., dist.Work]:
        count = prepare.__code__.co_argcount - 1

        @functools.wraps(prepare)
        def whole(group: HasCaller, *args: Any, opts: Any = None) -> dist.Work:
            try:
                if len(args) < count or args[-1] is None:
                    args = *args[: count - 1], opts or options()
                caller, key, out = group._caller, None, None
                if like is not None and (repeated := like(caller, args)) is not None:
                    key, x, out = repeated
                    if (work := caller.repeat(key, x, out, args[-1])) is not None:
                        return work
                first = functools.partial(prepare, group, *args)
                return caller.start(what, first, args[-1], key, out)
            except BaseException as error:
                group._caller.abort_if_interrupted(error)
                raise

        return whole

    return make

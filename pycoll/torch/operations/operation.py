"""What makes a method of the group an operation, and the forms of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycoll.torch.calls.caller import Caller, Job, Key
from pycoll.torch.tensors.layout import Tensors

Prepared = tuple[Job, Tensors]
Repeated = tuple[Key, torch.Tensor | None, torch.Tensor] | None
"""What `Caller.repeat` takes; None if calls like it are not repeated."""
Like = Callable[[Caller, tuple], Repeated]
"""Finds that out for the arguments of an operation."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor of each rank to all, by rank."""
_LISTS = ("tensors", "outputs")  # first arguments of methods that take lists
_OPS = dist.ReduceOp, dist.ReduceOp.RedOpType


def _with_options(options: type, given: list) -> Any:
    """Return options with a reduction, a root and a timeout, each known by its type."""
    made = options()
    for value in given:
        if isinstance(value, _OPS):
            made.reduceOp = value
        elif isinstance(value, timedelta):
            made.timeout = value
        elif isinstance(value, int):
            made.rootRank = value
        elif value is not None:
            raise TypeError(f"expected {options.__name__}, or what they hold, but got {value!r}")
    return made


def full_form(prepare: Callable, options: type, args: tuple, words: dict) -> tuple:
    """Return the arguments of a method with its options, the last, from any form of PyTorch's.

    PyTorch's own groups also take a reduction, a root and a timeout instead of options, and
    tensors where lists of one are meant: ``group.broadcast(tensor, root)``.
    """
    code = prepare.__code__
    count, opts = code.co_argcount - 2, words.pop("opts", None)
    tensors, given = args[:count], [*args[count:]]
    if len(given) == 1 and opts is None and hasattr(given[0], "timeout"):
        (opts,) = given  # options of another operation, which older versions pass
    elif opts is None:
        given += [words.pop(name, None) for name in ("root", "op", "timeout")]
        opts = _with_options(options, given)
    if words:
        raise TypeError(f"{prepare.__name__}() got unexpected arguments: {', '.join(words)}")
    if code.co_varnames[1] in _LISTS and any(isinstance(x, torch.Tensor) for x in tensors):
        tensors = tuple([x] for x in tensors)
    return *tensors, opts


def _held(given: Any) -> Any:
    """Return an argument whose lists the program cannot change while the call waits."""
    return [_held(x) for x in given] if isinstance(given, (list, tuple)) else given


def _has_to_copy(args: tuple) -> bool:
    """Tell whether a call needs its tensors elsewhere: gathered, packed, or multiplied.

    Those on devices are in the order of their streams.
    """
    *given, opts = args
    lists = [x for x in given if isinstance(x, list) and x]
    alone = [x[0] if isinstance(x, list) and x else x for x in given]
    tensors = [x for x in alone if isinstance(x, torch.Tensor)]
    if not all(x.is_cpu for x in tensors):
        return False
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        return True
    return any(len(x) > 1 or isinstance(x[0], list) for x in lists) or not all(
        x.layout is torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        for x in tensors
    )


def operation(what: str, options: type, like: Like | None = None) -> Callable:
    """Turn a method that checks arguments, and returns a job with its result, into an operation.

    The operation fills in missing options, makes the call or repeats an earlier one, and ends the
    group if an interrupt comes anywhere in it.

    Args:
        what: Its name, for messages.
        options: PyTorch's options for it, its last argument.
        like: See `Like`.
    """

    def make(prepare: Callable[..., Prepared]) -> Callable[..., dist.Work]:
        count = prepare.__code__.co_argcount - 1

        @functools.wraps(prepare)
        def whole(group: Any, *args: Any, **words: Any) -> dist.Work:
            try:
                if len(args) != count or type(args[-1]) is not options:
                    args = full_form(prepare, options, args, words)
                caller, key, out = group._caller, None, None
                if like is not None and (repeated := like(caller, args)) is not None:
                    key, x, out = repeated
                    if (work := caller.repeat(key, x, out, args[-1])) is not None:
                        return work
                args = tuple(map(_held, args))
                first = functools.partial(prepare, group, *args)
                copies = caller.background.busy and _has_to_copy(args)
                return caller.start(what, first, args[-1], key, out, copies)
            except BaseException as error:
                group._caller.abort_if_interrupted(error)
                raise

        return whole

    return make

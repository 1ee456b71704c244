"""What pycoll changes in PyTorch, so that groups and works in Python pass for those in C++.

Every change is harmless if it is made again.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycoll import _C
from pycoll.torch.errors import from_text

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
except ImportError:  # an older PyTorch, which looks at fewer functions
    set_code_exec_strategy = None

_works: weakref.WeakKeyDictionary[dist.Reducer, dist.Work] = weakref.WeakKeyDictionary()


def replace(owner: Any, name: str, change: Callable[[Callable], Callable]) -> None:
    """Replace what a class or module has under a name, if it does, by what `change` makes; once."""
    plain = getattr(owner, name, None)
    if plain is not None and not hasattr(plain, "__wrapped__"):
        setattr(owner, name, functools.wraps(plain)(change(plain)))


def use_python_hooks(group_class: type) -> None:
    """Give DDP models of a class of groups PyTorch's communication hooks in Python.

    The built-in ones are in C++, which cannot read futures of Python.
    """

    def change(plain: Callable) -> Callable:
        def register(model: DistributedDataParallel, comm_hook_type: Any) -> None:
            if not isinstance(model.process_group, group_class):
                plain(model, comm_hook_type)
                return
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
            model.register_comm_hook(model.process_group, hook)

        return register

    replace(DistributedDataParallel, "_register_builtin_comm_hook", change)


def keep_works() -> None:
    """Make DDP's reducers keep the Python half of the work that counts the ranks of `join`.

    C++ keeps only its own half. Without the other, ``wait`` is that of PyTorch's class, which waits
    for ever, and ``getFuture`` is "not implemented".
    """

    def change(plain: Callable) -> Callable:
        def kept(reducer: dist.Reducer, work: dist.Work, use_static_world_size: bool) -> None:
            _works[reducer] = work
            plain(reducer, work, use_static_world_size)

        return kept

    replace(dist.Reducer, "_set_forward_pass_work_handle", change)


def trainers(reducer: dist.Reducer) -> int:
    """Return how many ranks have not left `join`, as this rank's last forward pass has counted.

    It is 1 on a rank that took no step in a `join`.
    """
    work = _works.get(reducer)
    return 1 if work is None else int(work.result()[0].item())


def keep_error_types() -> None:
    """Make futures raise the errors of the backend, of which C++ keeps only the text."""

    def change(plain: Callable) -> Callable:
        def typed(future: torch.futures.Future) -> Any:
            try:
                return plain(future)
            except RuntimeError as error:
                known = from_text(str(error)) if type(error) is RuntimeError else None
                if known is None:
                    raise
                raise known from error

        return typed

    for name in ("wait", "value"):
        replace(torch._C.Future, name, change)


def shorten_all_reduce(group_class: type) -> None:
    """Let ``dist.all_reduce`` repeat a call of a class of groups at once.

    What PyTorch does before it calls a group takes as long as the call. Its function stays the
    object by which the compiler knows it; what its outermost wrapper calls is replaced.
    """
    wrapper = dist.all_reduce
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cell = dict(zip(names, getattr(wrapper, "__closure__", None) or (), strict=False)).get("func")
    if cell is None or not callable(cell.cell_contents) or hasattr(cell.cell_contents, "shortened"):
        return
    plain, world = cell.cell_contents, dist.distributed_c10d._world
    summed, watched = dist.ReduceOp.SUM, torch.overrides.has_torch_function_unary

    @functools.wraps(plain)
    def all_reduce(
        tensor: torch.Tensor,
        op: Any = summed,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        try:
            found = world.default_pg if group is None else group
            made = (
                type(found) is group_class
                and async_op is False
                and not world.pg_coalesce_state
                and not watched(tensor)
                and found._caller.sums(tensor, op)
            )
            return None if made else plain(tensor, op, group, async_op)
        except BaseException as error:
            found = world.default_pg if group is None else group
            if type(found) is group_class:
                found._caller.abort_if_interrupted(error)
                if isinstance(error, _C.EngineError):
                    found._caller.fail(error, "all_reduce")
            raise

    all_reduce.shortened = True
    cell.cell_contents = all_reduce


def set_timeouts(group_class: type) -> None:
    """Make ``_set_pg_timeout`` know a class of groups; it knows those of gloo and NCCL by name."""

    def change(plain: Callable) -> Callable:
        def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
            found = dist.group.WORLD if group is None else group
            if isinstance(found, group_class):
                found.set_timeout(timeout)
            else:
                plain(timeout, group)

        return set_timeout

    replace(dist.distributed_c10d, "_set_pg_timeout", change)


def offer_monitored_barrier(group_class: type) -> None:
    """Make ``dist.monitored_barrier`` know a class of groups; it knows that of gloo by name."""

    def change(plain: Callable) -> Callable:
        def monitored_barrier(
            group: dist.ProcessGroup | None = None,
            timeout: timedelta | float | None = None,
            wait_all_ranks: bool = False,
        ) -> None:
            found = dist.group.WORLD if group is None else group
            if not isinstance(found, group_class):
                plain(group, timeout, wait_all_ranks)
                return
            if isinstance(timeout, float):  # as PyTorch does, with a warning
                timeout = timedelta(seconds=timeout)
            found.monitored_barrier(timeout, wait_all_ranks)

        return monitored_barrier

    replace(dist.distributed_c10d, "monitored_barrier", change)
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier


def do_not_compile_methods(*classes: type) -> None:
    """Keep ``torch.compile`` away from the methods of classes, and from what they call.

    Compiled programs call a group from C++, while the compiler looks at every Python function that
    is entered: it would take those of the group for the user's.
    """
    for cls in classes:
        for code in _methods(cls):
            _skip(code)


def do_not_compile(*functions: FunctionType) -> None:
    """Make ``torch.compile`` call functions as they are, between the graphs that it makes.

    Like `torch.compiler.disable`, which takes a second because it imports the compiler.
    """
    for function in functions:
        function._torchdynamo_disable = True  # for the compiler of a function that calls it
        _skip(function.__code__)  # for what Python enters


def _skip(code: CodeType) -> None:
    if set_code_exec_strategy is not None:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(code, strategy)


def _methods(cls: type) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base.__module__.startswith("pycoll."):
            for member in vars(base).values():
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType):
                    yield from _nested(function.__code__)
                    yield from _nested(inspect.unwrap(function).__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)

"""Keeping ``torch.compile`` from compiling the backend itself.

Compiled programs call a process group from C++. The compiler is then still looking at every Python
function that is entered, and would take those of the group for the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
except ImportError:  # an older PyTorch, which looks at fewer functions
    set_code_exec_strategy = None


def run_as_it_is(*classes: type) -> None:
    """Tell the compiler to leave the methods of some classes alone, and what they call."""
    if set_code_exec_strategy is None:
        return
    leave = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for cls in classes:
        for code in _methods(cls):
            set_code_exec_strategy(code, leave)


def leave_alone(*functions: FunctionType) -> None:
    """Tell the compiler to call some functions as they are, between the graphs that it makes.

    The mark is that of `torch.compiler.disable`, which takes a second: it imports the compiler.
    """
    for function in functions:
        function._torchdynamo_disable = True  # for the compiler of a function that calls it
        if set_code_exec_strategy is not None:  # for what Python enters
            leave = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
            set_code_exec_strategy(function.__code__, leave)


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

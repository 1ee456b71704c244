"""Declaring the collectives of a communicator: a signature in Python, a body in the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from pycoll import _C
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

_F = TypeVar("_F", bound=Callable)
_ARGUMENTS = (
    *("kind", "x", "out", "op", "root", "order", "algorithm", "timeout", "async_op"),
    "stream",
)
_DEFAULTS = (None, None, None, "sum", 0, None, None, None, False, None)

_OPTIONS = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    for name, default in (
        ("algorithm", None),
        ("timeout", None),
        ("async_op", False),
        ("stream", None),
    )
}


class CallOptions(TypedDict, total=False):
    """Keyword arguments that every collective takes; see `Communicator`."""

    algorithm: str | Algorithm | None
    timeout: float | None
    async_op: bool
    stream: Any


def reports_misuse(method: _F) -> _F:
    """Make a method in Python tell the peers of a call that does not fit its signature.

    They hear of an interrupt, too, wherever in the method it comes.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is None:  # it has not begun
                self._session.misused(str(error))
            raise
        except Exception:
            raise
        except BaseException as error:
            self._session.interrupted(error)
            raise

    return call


def collective(kind: Kind, *, in_place: bool = False) -> Callable[[_F], _F]:
    """Make a method run a collective.

    The function decorated gives the method its parameters, defaults and documentation; its body is
    not used. A call whose like has been made before goes from the caller straight into the
    engine; any other goes through `Session.call`.

    Args:
        kind: What the method runs. ``**options`` stands for algorithm, timeout, async_op and
            stream.
        in_place: Without ``out`` the result takes the place of ``x``.
    """

    def decorate(function: _F) -> _F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        given = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
        if len(given) < len(parameters):
            given |= _OPTIONS
        names = tuple(a if a in given else None for a in _ARGUMENTS)
        positional = tuple(
            _ARGUMENTS.index(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD
        )
        defaults = tuple(
            default
            if name is None
            else name
            if given[name].default is inspect.Parameter.empty
            else given[name].default
            for name, default in zip(names, _DEFAULTS, strict=True)
        )
        method = _C.Method(kind, names, positional, defaults, in_place)
        return functools.update_wrapper(method, function)

    return decorate

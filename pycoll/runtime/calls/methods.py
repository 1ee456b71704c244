"""Declaring the collectives of a communicator: a signature in Python, a body in the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from pycoll import _C
from pycoll.runtime.calls.other_arguments import explains
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

_F = TypeVar("_F", bound=Callable)
_DEFAULTS = {
    **{"kind": None, "x": None, "out": None, "op": "sum", "root": 0, "order": None},
    **{"algorithm": None, "timeout": None, "async_op": False, "stream": None},
}
"""Of all arguments, in the order in which the engine has them."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments that every collective takes; see `Communicator`."""

    algorithm: str | Algorithm | None
    timeout: float | None
    async_op: bool
    stream: Any


class ReduceOptions(CallOptions, total=False):
    """Those of every reduction; see `Communicator.all_reduce`."""

    order: str | None


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


if TYPE_CHECKING:

    class Caller:
        """What has methods that `collective` has made.

        Attributes:
            _fast: What runs calls. Without it methods call `_closed`, which raises.
        """

        _fast: Any

else:
    Caller = _C.Caller


def collective(kind: Kind, *, in_place: bool = False) -> Callable[[_F], _F]:
    """Make a method run a collective.

    The function decorated gives the method its parameters, defaults and documentation; its body is
    not used; its ``**options`` stand for `ReduceOptions` if it has an ``op``, else for
    `CallOptions`. A call whose like has been made before goes from the caller straight into the
    engine; any other goes through `Session.call`.

    Args:
        kind: What the method runs.
        in_place: Without ``out`` the result takes the place of ``x``.
    """

    def decorate(function: _F) -> _F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        given = {p.name: p.default for p in parameters}
        if given.pop("options", None) is not None:
            names = (ReduceOptions if "op" in given else CallOptions).__optional_keys__
            given |= {name: _DEFAULTS[name] for name in names}
        names = tuple(name if name in given else None for name in _DEFAULTS)
        place = list(_DEFAULTS).index
        positional = tuple(place(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        defaults = tuple(
            name if default is inspect.Parameter.empty else default
            for name, default in (_DEFAULTS | given).items()
        )
        method = _C.Method(kind, names, positional, defaults, in_place, None, False)
        return functools.update_wrapper(method, function)

    return decorate


_MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv", "send_object", "recv_object")
"""As MessageCall has them."""
_OF_MESSAGES = {
    **{"message": None, "x": None, "out": None, "dst": None, "src": None, "tag": 0},
    **{"recv_tag": None, "timeout": None, "stream": None, "pickle": False},
}
_OF_V_VARIANTS = {
    **{"kind": None, "x": None, "out": None, "op": "sum", "root": 0, "order": None},
    **{"counts": (), "timeout": None, "return_counts": False},
}
_OF_OBJECTS = {"kind": None, "x": None, "root": 0, "pickle": False, "timeout": None}
"""Of all arguments, in the order in which the engine has them, as in MessageArg and its like."""


def message(function: _F) -> _F:
    """Make a method send or receive plain arrays, or objects, in the extension.

    A call that is not usual goes to the function decorated: of another array or dtype, of
    ``pycoll.ANY`` as the tag of an array, or with arguments that are wrong.
    """
    into = function.__name__ in ("recv", "irecv")  # their ``x`` is what others call ``out``
    number = _MESSAGES.index(function.__name__)
    return _served(explains(function), number, _OF_MESSAGES, renamed={"x": "out"} if into else {})


def v_variant(kind: Kind) -> Callable[[_F], _F]:
    """Make a method run a v-variant like an earlier one without Python code.

    Any other call goes to the function decorated.
    """
    return lambda function: _served(function, kind, _OF_V_VARIANTS)


def of_objects(kind: Kind) -> Callable[[_F], _F]:
    """Make a method run a call on small Python objects in the extension, from the second on.

    Any other call goes to the function decorated.
    """

    def decorate(function: _F) -> _F:
        listed = "xs" in inspect.signature(function).parameters
        return _served(function, kind, _OF_OBJECTS, renamed={"xs": "x"} if listed else {})

    return decorate


def _served(
    function: Any,
    kind: int,
    defaults: Mapping[str, Any],
    *,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Make a method that the extension serves if it can, and else the function."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    called = {renamed.get(p.name, p.name): p for p in parameters}
    names = tuple(called[name].name if name in called else None for name in defaults)
    place = list(defaults).index
    by_place = (name for name, p in called.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    values = tuple(
        default if name not in called else _default(called[name])
        for name, default in defaults.items()
    )
    positional, objects = tuple(map(place, by_place)), defaults is _OF_OBJECTS
    method = _C.Method(kind, names, positional, values, False, function, objects)
    return functools.update_wrapper(method, function)


def _default(parameter: inspect.Parameter) -> Any:
    """Return a default; the name stands for none."""
    return parameter.name if parameter.default is parameter.empty else parameter.default


def name_methods(known: type) -> None:
    """Let errors about arguments name the class that users know, not the part it comes from."""
    for part in known.__mro__[1:-1]:
        for layer in vars(part).values():
            while isinstance(layer, (FunctionType, _C.Method)):
                layer.__qualname__ = f"{known.__name__}.{layer.__name__}"
                layer = getattr(layer, "__wrapped__", None)

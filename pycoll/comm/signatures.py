"""What collectives return, for type checkers: a NumPy array in, a NumPy array out.

The methods of `pycoll.Communicator` run in the extension, and have their parameters, defaults and
documentation from the functions in the class. Here are the types of their results:

* a NumPy array gives a NumPy array of its dtype, and ``out`` gives what it is;
* ``async_op=True`` gives a `Work`;
* a number, a list, or an array of another library gives Any.

Where some ranks get None, the result is the array or Any: who asks for it knows its rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, cast, overload

import numpy as np

from pycoll.runtime.calls.methods import collective
from pycoll.runtime.calls.work import BoundPlan, PersistentCall, Work
from pycoll.schedule.ir import Algorithm
from pycoll.types import Kind

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack

Op = str | Callable[[Any, Any], Any]
_S = TypeVar("_S", bound="tuple[int, ...]")
_D = TypeVar("_D", bound="np.dtype[Any]")
_B = TypeVar("_B")


class _Options(TypedDict, total=False):
    algorithm: str | Algorithm | None
    timeout: float | None
    stream: Any


class _Reducing(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        op: Op = "sum",
        *,
        out: None = None,
        order: str | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D]: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: _B,
        order: str | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        order: str | None = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: None = None,
        order: str | None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _ReducingToRoot(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        op: Op = "sum",
        *,
        out: None = None,
        root: int = 0,
        order: str | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D] | Any: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: _B,
        root: int = 0,
        order: str | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        root: int = 0,
        order: str | None = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: None = None,
        root: int = 0,
        order: str | None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _Moving(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D]: ...

    @overload
    def __call__(
        self,
        x: Any,
        *,
        out: _B,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any,
        *,
        out: None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _Gathering(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        root: int = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D] | Any: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: _B,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _Broadcasting(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        root: int = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D]: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: _B,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _Scattering(Protocol):
    @overload
    def __call__(
        self,
        x: np.ndarray[_S, _D],
        root: int = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> np.ndarray[_S, _D]: ...

    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: _B,
        async_op: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> _B: ...

    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        async_op: Literal[True],
        **options: Unpack[_Options],
    ) -> Work: ...

    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: None = None,
        async_op: bool = False,
        **options: Unpack[_Options],
    ) -> Any: ...


class _PlanOptions(TypedDict, total=False):
    root: int
    order: str | None
    algorithm: str | Algorithm | None


class _Planning(Protocol):
    @overload
    def __call__(
        self,
        collective: str,
        like: Any,
        op: str = "sum",
        *,
        persistent: Literal[False] = False,
        **options: Unpack[_PlanOptions],
    ) -> BoundPlan: ...

    @overload
    def __call__(
        self,
        collective: str,
        like: Any,
        op: str = "sum",
        *,
        out: Any = None,
        persistent: Literal[True],
        **options: Unpack[_PlanOptions],
    ) -> PersistentCall: ...


def _plain(kind: Kind, in_place: bool = False) -> Callable[[Callable[..., Any]], Any]:
    return collective(kind, in_place=in_place)


def reducing(kind: Kind) -> Callable[[Callable[..., Any]], _Reducing]:
    """Declare a reduction of which every rank gets something."""
    return _plain(kind)


def reducing_to_root(kind: Kind) -> Callable[[Callable[..., Any]], _ReducingToRoot]:
    """Declare a reduction of which the root gets something."""
    return _plain(kind)


def moving(kind: Kind) -> Callable[[Callable[..., Any]], _Moving]:
    """Declare a collective that moves data from all ranks to all."""
    return _plain(kind)


def gathering(kind: Kind) -> Callable[[Callable[..., Any]], _Gathering]:
    """Declare a collective of which the root gets something."""
    return _plain(kind)


def broadcasting(kind: Kind, *, in_place: bool) -> Callable[[Callable[..., Any]], _Broadcasting]:
    """Declare a collective in which the root has the data."""
    return _plain(kind, in_place)


def scattering(kind: Kind) -> Callable[[Callable[..., Any]], _Scattering]:
    """Declare a collective in which other ranks than the root may have no array."""
    return _plain(kind)


def planning(method: Callable[..., Any]) -> _Planning:
    """Declare what prepares a collective."""
    return cast("_Planning", method)

"""Calls in progress, and calls prepared once to run many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.errors import ArgumentError, CollError, CollTimeout
from pycoll.runtime.arrays import view

if TYPE_CHECKING:
    from pycoll.runtime.session import Session


class Work:
    """A call that runs in the background; its arrays are kept alive until it is done."""

    def __init__(self, session: Session, ticket: int, keep: Any, result: Any) -> None:
        """Hold on to a call in the engine's queue; see `Session`."""
        self._session, self._ticket = session, ticket
        self._keep, self._result = keep, result
        self._engine = session.engine  # outlives a close, which finishes the queue
        self._finished = False
        self._error: CollError | None = None

    def done(self) -> bool:
        """Tell whether the call has ended, without waiting."""
        return self._finished or self._engine.done(self._ticket)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call to end.

        Args:
            timeout: Seconds; by default as long as the call itself may take.

        Returns:
            What the blocking call would have returned.

        Raises:
            ArgumentError: If ``timeout`` is no number of seconds, 0 or more.
            CollTimeout: If it is not done in time; the call goes on and may be waited for again.
            CollError: What the blocking call would have raised.
        """
        if not self._finished:
            limit = -1.0 if timeout is None else check_patience(timeout)
            try:
                self._session.guard(self._engine.wait, self._ticket, limit)
            except CollError as error:
                if isinstance(error, CollTimeout) and self._engine.report() is None:
                    raise  # only this wait is over
                self._error = error
            self._finished = True
            self._session.sweep()
        if self._error is not None:
            raise self._error
        return self._result


def check_patience(timeout: float) -> float:
    """Return the seconds that a wait may take, refusing what is no such number."""
    try:
        limit = float(timeout)
    except (TypeError, ValueError, OverflowError):
        limit = -1.0
    if not limit >= 0:
        raise ArgumentError(f"timeout={timeout!r}; accepted is a number of seconds, 0 or more")
    return limit


class BoundPlan:
    """A collective prepared for one shape and dtype; see `pycoll.Communicator.plan`."""

    def __init__(self, session: Session, method: Callable[..., Any], like: Any) -> None:
        """Take the collective, a method of the communicator with all arguments but the arrays."""
        self._session, self._method = session, method
        pattern = view(like, "like")
        self._shape, self._name, self._told = pattern.array.shape, pattern.name, pattern.told
        self._dtype = like.dtype if type(like) is np.ndarray else None

    def __call__(
        self, x: Any, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Run it; arguments as for the collective.

        Raises:
            ArgumentError: If ``x`` has not the shape and dtype the plan was made for.
        """
        plain = type(x) is np.ndarray and self._dtype is not None  # None equals float64 for NumPy
        if not plain or x.dtype != self._dtype or x.shape != self._shape:
            self._session.refusing(lambda: self._check(x))
        return self._method(x, out=out, timeout=timeout, async_op=async_op)

    def _check(self, x: Any) -> None:
        given = view(x, "x")
        if given.array.shape != self._shape or given.told != self._told:
            raise ArgumentError(
                f"x is {given.name}{list(given.array.shape)}; this plan was made for "
                f"{self._name}{list(self._shape)}"
            )

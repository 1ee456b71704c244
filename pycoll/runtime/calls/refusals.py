"""What the peers hear of a call that ends on one rank before it reaches the engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pycoll.errors import CollError, in_words

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable)


def in_parts(function: _F) -> _F:
    """Make a function run a call of several parts on a session, its first argument.

    An interrupt between two parts ends the communicator as well.
    """

    @functools.wraps(function)
    def call(session: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(session, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            session.interrupted(error)
            raise

    return call


class Refusals:
    """The methods of `pycoll.runtime.sessions.session.Session` that prepare calls.

    Whatever can raise on one rank alone belongs into `refusing`. A peer that is told nothing takes
    the next call of this rank, which may be just like this one, for its part of this one.
    """

    rank: int
    engine: Any
    guard: Any
    site: Any
    abort: Any

    def refusing(self, prepare: Callable[[], _T]) -> _T:
        """Prepare a call; if that fails, let the peers of this call know.

        An interrupt ends the communicator, as it does inside a call.
        """
        _ = self.engine  # raises CommClosed
        try:
            return prepare()
        except Exception as error:
            self._refuse(in_words(error))
            raise
        except BaseException as error:
            self.interrupted(error)
            raise

    def misused(self, text: str) -> None:
        """Raise `TypeError` for a call that does not fit its signature; let its peers know."""

        def prepare() -> None:
            raise TypeError(text)

        self.refusing(prepare)

    def interrupted(self, error: BaseException) -> None:
        """Let all ranks know of an interrupt, unless they do; it is what the user gets."""
        with contextlib.suppress(CollError):
            self._interrupted(type(error).__name__)

    def _refuse(self, text: str) -> None:
        """Make all ranks leave this call."""
        self.guard(self.engine.refuse, text, self.site())

    def _interrupted(self, name: str) -> None:
        """Tell all ranks the name of the exception that has interrupted this one."""
        self.abort(f"rank {self.rank} was interrupted ({name})")

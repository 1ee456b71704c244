"""One session, several users: all who call `pycoll.init` share the communicator of the job."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from dataclasses import asdict
from typing import Any

from pycoll.config import Config
from pycoll.errors import ArgumentError
from pycoll.runtime.sessions.session import Session


class Joined:
    """What this process has joined by `pycoll.init`.

    Attributes:
        config: The settings of which that was made.
    """

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None
        self._kept: Session | None = None  # the same, if nothing else refers to it
        self.config: Config = Config()
        self._pid = 0
        self._link: tuple[int, Any] = 0, None

    @property
    def link(self) -> Any:
        """A `Link` to a job whose ranks have not met in time, so that they can try again."""
        pid, link = self._link
        return link if pid == os.getpid() else None

    @link.setter
    def link(self, link: Any) -> None:
        self._link = os.getpid(), link

    def remember(self, session: Session, config: Config, once: bool) -> Session:
        """Keep a session for those who come later, and return it.

        What can be joined only ``once`` stays open when a program drops it: a function that calls
        `pycoll.init` can be called again.
        """
        self._kept = session if once else None
        self._session, self.config, self._pid = weakref.ref(session), config, os.getpid()
        return session

    @property
    def session(self) -> Session | None:
        """What was joined; None if there is nothing, it was closed, or is that of a parent."""
        session = self._session() if self._session is not None else None
        return session if session and is_open(session) and self._pid == os.getpid() else None

    def check(self, wanted: Config | ArgumentError) -> None:
        """Raise ArgumentError unless these are the settings."""
        wanted = valid(wanted)
        asked, has = asdict(wanted), asdict(self.config)
        if odd := [name for name in has if asked[name] != has[name]]:
            texts = (f"{name}={asked[name]!r} and not {has[name]!r}" for name in odd)
            raise ArgumentError(
                "init gives the communicator again that this process has joined before, and now "
                f"it is to have {', '.join(texts)}: leave that out. Every call takes a timeout"
            )

    def follow(self, parent: Session, child: Session) -> Session:
        """Let the communicator that survivors or newcomers have made take the place of the job's.

        Returns:
            The child.
        """
        if self._session is not None and self._session() is parent:
            self._session = weakref.ref(child)
            self._kept = None if self._kept is None else child
        return child

    def forget(self, session: Session) -> None:
        """Let go of a session that has been closed."""
        if self._kept is session:
            self._kept = None


@functools.cache
def joined() -> Joined:
    """Return what this process has joined; there is one for each process."""
    return Joined()


def valid(config: Config | ArgumentError) -> Config:
    """Return settings, or raise what is wrong with them."""
    if isinstance(config, ArgumentError):
        raise config
    return config


def is_open(session: Session) -> bool:
    """Tell whether this rank has not closed it."""
    return session._engine is not None


def end_use(session: Session, user: object) -> Session:
    """Close an open session, once its last user has done so.

    Returns:
        What the user has from now on: the session, or one that looks like it and is closed.
    """
    session.users.discard(user)
    if not session.users:
        try:
            session.end()
        finally:
            if is_open(session):  # it was refused
                session.users.add(user)
            else:
                joined().forget(session)
        return session
    closed = copy.copy(session)
    closed._caller = closed._engine = closed._postbox = None  # as in its close
    return closed

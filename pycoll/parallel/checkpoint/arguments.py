"""What `save` and `load` are given, the same on every rank: a path, an engine, and settings."""

from __future__ import annotations

import os
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.compare import check_same, gather_problems
from pycoll.parallel.engine.data_parallel import DataParallel


def checked(path: Any, engine: Any, call: str, refused: str = "", **settings: Any) -> str:
    """Return the path as a text, once ranks have compared it and the settings; a collective.

    `refused` is why this rank's settings cannot be used.

    Raises:
        ArgumentError: For what is no engine; on every rank for what is no path, and if a rank's
            settings are refused.
        MismatchError: On every rank, if they have other paths or settings.
    """
    given = f"a {type(path).__name__} and a {type(engine).__name__}"
    wrong = (
        f"{given}; expected {call}(path, engine), a folder and DataParallel or another engine that "
        "trains"
    )
    if not isinstance(engine, DataParallel):
        raise ArgumentError(f"{call} is given {wrong}")
    known, world = isinstance(path, (str, os.PathLike)), engine.groups.world
    if problems := gather_problems(refused if known else wrong, world):
        raise ArgumentError(f"{call} was refused: {problems}")
    folder = os.fspath(path)
    lines = {"path": os.path.abspath(folder), **settings}
    check_same([f"{k}={v!r}" for k, v in lines.items()], f"arguments of {call}", world)
    return folder

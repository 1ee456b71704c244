"""What `save` and `load` are given: a path and an engine, in this order."""

from __future__ import annotations

import os
from typing import Any

from pycoll.errors import ArgumentError
from pycoll.parallel.engine.data_parallel import DataParallel


def checked(path: Any, engine: Any, call: str) -> str:
    """Return the path as a text.

    Raises:
        ArgumentError: For what is no path or no engine.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(engine, DataParallel):
        raise ArgumentError(
            f"{call} is given a {type(path).__name__} and a {type(engine).__name__}; expected "
            f"{call}(path, engine), a folder and DataParallel or another engine that trains"
        )
    return os.fspath(path)

"""Algorithms by name: those of the registry, and ``FILE.py:NAME`` for those of a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pycoll.algorithms import find
from pycoll.errors import ArgumentError
from pycoll.schedule.ir import Algorithm

HELP = "or FILE.py:NAME for one of your own"


def is_own(text: str) -> bool:
    """Whether a text names an algorithm of a file."""
    return text.partition(":")[0].endswith(".py")


def lookup(text: str) -> Algorithm:
    """Return an algorithm by ``FILE.py:NAME``, or by ``collective/name``.

    Raises:
        ArgumentError: If the file cannot be run, or has no such algorithm.
        ScheduleError: If the registry has none.
    """
    if is_own(text):
        return _of_file(*text.partition(":")[::2])
    collective, _, name = text.partition("/")
    return find(collective, name)


def _of_file(path: str, name: str) -> Algorithm:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does
        raise ArgumentError(f"{path}: {type(error).__name__}: {error}") from error
    found = {key: value for key, value in vars(module).items() if isinstance(value, Algorithm)}
    if name in found:
        return found[name]
    if not name and len(found) == 1:
        return next(iter(found.values()))
    which = f"no algorithm {name!r}" if name or not found else "several algorithms"
    raise ArgumentError(f"{path} has {which}; there are: {', '.join(found) or 'none'}")

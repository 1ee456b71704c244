"""Algorithms by name: those of the registry, and ``FILE.py:NAME`` for those of a file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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
    module = _loaded(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Algorithm)}
    if name in found:
        return found[name]
    if not name and len(found) == 1:
        return next(iter(found.values()))
    which = f"no algorithm {name!r}" if name or not found else "several algorithms"
    raise ArgumentError(f"{path} has {which}; there are: {', '.join(found) or 'none'}")


def _loaded(path: str) -> ModuleType:
    """Run a file as an import would, once: it finds its neighbours, and others find it by name.

    A name that another module has is left to that one; then the file goes by its path.
    """
    place = os.path.realpath(path)
    folder, name = os.path.dirname(place), Path(place).stem
    if getattr(sys.modules.get(name), "__file__", place) != place:
        name = place.replace(".", "_")  # a dot would make it a part of a package
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path} is no Python file")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does
        del sys.modules[name]
        raise ArgumentError(f"{path}: {type(error).__name__}: {error}") from error
    return module

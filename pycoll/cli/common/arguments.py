"""Arguments that several commands take: names, sizes, algorithms, files that will be written.

What is wrong with them is an `ArgumentError`, before the work begins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pycoll.algorithms import closest, find
from pycoll.config import parse_bytes
from pycoll.errors import ArgumentError
from pycoll.schedule.ir import Algorithm
from pycoll.types import DType, Order, ReduceOp

ALGORITHM = "or FILE.py:NAME for one of your own"
PIPELINE = "pipeline:"  # how the name of a pipeline schedule begins
OPS, ORDERS = ([m.name.lower() for m in kind] for kind in (ReduceOp, Order))
DTYPES = [dtype.name.lower() for dtype in DType if dtype != DType.BOOL]  # numbers
Kind = TypeVar("Kind")
_ADDRESSES = 1 << 47  # bytes that a process can address


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Return the type of an option that is one of some names; of others it tells the closest."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"there is no {text!r}{closest(text, list(known))}")
        return text

    return name


def in_memory(text: str) -> int:
    """Read a size of arrays, such as ``8``, ``1K`` or ``64M``."""
    nbytes = parse_bytes(text)
    if nbytes > _ADDRESSES:
        raise ArgumentError(f"{text!r} is more than a process can address, {_ADDRESSES >> 40}T")
    return nbytes


def size(text: str) -> int:
    """Read a size as `in_memory` does, as the type of an option."""
    try:
        return in_memory(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least(option: str, value: float | None, least: int) -> None:
    """Refuse a number that is too small; None was not given."""
    if value is not None and value < least:
        raise ArgumentError(f"{option} is {value}, expected at least {least}")


def check_reduction(collective: str, reduces: bool, dtype: str, op: str | None) -> None:
    """Refuse an operation that a collective or an element type does not have."""
    if reduces and op in ("and", "or", "xor") and DType[dtype.upper()].is_float:
        raise ArgumentError(f"--op {op} is defined for integers; --dtype is {dtype}")
    if op and not reduces:
        raise ArgumentError(f"--op {op} is for reductions; {collective} reduces nothing")


def add_pipeline_sizes(parser: argparse.ArgumentParser, stages: str, micro_batches: str) -> None:
    """Add the sizes of a pipeline, with defaults."""
    names = {"-p": ("stages", stages), "-m": ("micro_batches", micro_batches)}
    for option, (name, default) in names.items():
        text = f"{name.replace('_', '-')} of pipeline:NAME (default {default})"
        parser.add_argument(option, dest=name, default=default, metavar="N", help=text)


# --- Algorithms -----------------------------------------------------------------------------------


def is_own(text: str) -> bool:
    """Whether a text names an algorithm of a file."""
    return text.partition(":")[0].endswith(".py")


def lookup(text: str, collective: str = "") -> Algorithm:
    """Return an algorithm by ``FILE.py:NAME``, ``collective/name``, or name in a collective."""
    if is_own(text):
        return of_file(*text.partition(":")[::2], Algorithm, "algorithm")
    return find(*([collective, text] if collective else text.split("/", 1)))


def of_file(path: str, name: str, kind: type[Kind], what: str) -> Kind:
    """Return what a Python file has under a name; without a name, its only one of a kind."""
    module = _loaded(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, kind)}
    if name in found:
        return found[name]
    if not name and len(found) == 1:
        return next(iter(found.values()))
    which = f"no {what} {name!r}" if name or not found else f"several {what}s"
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


# --- Files ----------------------------------------------------------------------------------------


def check_writable(option: str, path: str | Path) -> None:
    """Refuse a file that cannot be written; directories that are not there will be made."""
    try:
        problem = _problem(Path(path)) if str(path) else "a directory"
    except OSError as error:  # a name that is too long, a folder that is closed to us
        problem = error.strerror or str(error)
    if problem:
        raise ArgumentError(f"{option} {str(path)!r}: {problem}")


def _problem(file: Path) -> str:
    folder = file.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if file.is_dir():
        return "a directory"
    if not folder.is_dir():
        return f"{folder} is no directory"
    return "" if _is_writable(file, folder) else "it cannot be written"


def _is_writable(file: Path, folder: Path) -> bool:
    if file.exists():
        return os.access(file, os.W_OK)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_drawing(option: str) -> None:
    """Refuse to draw where matplotlib cannot be loaded."""
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ArgumentError(f"{option} needs matplotlib: pip install matplotlib") from None
    except Exception as error:  # whatever it makes of its settings
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"{option}: matplotlib cannot be loaded: {why}") from None


def put(path: str | Path, content: str | bytes) -> None:
    """Write a file, with its folders, at once: it is there as a whole, or as it was."""
    file = Path(path).resolve()  # a link stays
    content = content.encode("utf-8") if isinstance(content, str) else content
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not (file.is_file() and os.access(file.parent, os.W_OK)):
            file.write_bytes(content)  # a device, or in a folder that is closed to us
            return
        fresh.write_bytes(content)
        os.replace(fresh, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise ArgumentError(f"cannot write {str(path)!r}: {error.strerror}") from error


def check_table(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, or that holds something else than a table of times."""
    check_writable(option, path)
    with contextlib.suppress(FileNotFoundError):
        with path.open("rb") as file:  # maybe a device, which has no end
            begin = file.read(64).strip()
        if begin and not begin.startswith(b"{"):
            raise ArgumentError(f"{option} {str(path)!r} holds something else than a table")

"""Files that a command will write: what is wrong with them is said before the work."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from pathlib import Path

from pycoll.errors import ArgumentError


def check_writable(option: str, path: str | Path) -> None:
    """Refuse a file that cannot be written; directories that are not there will be made.

    Raises:
        ArgumentError: If it is a directory, or where it shall be is none or is closed to us.
    """
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
    """Refuse to draw where matplotlib cannot be loaded.

    Raises:
        ArgumentError: It is not installed, or does not take what MPLBACKEND or a file of its
            settings says.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ArgumentError(f"{option} needs matplotlib: pip install matplotlib") from None
    except Exception as error:  # whatever it makes of its settings
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"{option}: matplotlib cannot be loaded: {told}") from None


def put(path: str | Path, content: str | bytes) -> None:
    """Write a file, with its folders, at once: it is there as a whole, or as it was.

    Raises:
        ArgumentError: If that cannot be done.
    """
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
    """Refuse a file that cannot be written, or that holds something else than a table of times.

    Raises:
        ArgumentError: If it is so.
    """
    check_writable(option, path)
    with contextlib.suppress(FileNotFoundError):
        with path.open("rb") as file:  # maybe a device, which has no end
            begin = file.read(64).strip()
        if begin and not begin.startswith(b"{"):
            raise ArgumentError(f"{option} {str(path)!r} holds something else than a table")

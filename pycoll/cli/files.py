"""Files that a command will write: what is wrong with them is said before the work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from pycoll.errors import ArgumentError


def check_writable(option: str, path: str | Path) -> None:
    """Refuse a file that cannot be written; directories that are not there will be made.

    Raises:
        ArgumentError: If it is a directory, or where it shall be is none or is closed to us.
    """
    file = Path(path)
    folder = file.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    problem = ""
    if file.is_dir() or not str(path):
        problem = "a directory"
    elif not folder.is_dir():
        problem = f"{folder} is no directory"
    elif not _is_writable(file, folder):
        problem = "it cannot be written"
    if problem:
        raise ArgumentError(f"{option} {str(path)!r}: {problem}")


def _is_writable(file: Path, folder: Path) -> bool:
    if file.exists():
        return os.access(file, os.W_OK)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def put(path: str | Path, text: str) -> None:
    """Write a text file, with its folders.

    Raises:
        ArgumentError: If that cannot be done; a file that was not there before is not left.
    """
    file = Path(path)
    fresh = not file.exists()
    try:
        file.resolve().parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        if fresh:
            with contextlib.suppress(OSError):
                file.unlink()
        raise ArgumentError(f"cannot write {str(path)!r}: {error.strerror}") from error


def check_table(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, or that holds something else than a table of times.

    Raises:
        ArgumentError: If it is so.
    """
    check_writable(option, path)
    with contextlib.suppress(FileNotFoundError):
        begin = path.read_bytes()[:64].strip()
        if begin and not begin.startswith(b"{"):
            raise ArgumentError(f"{option} {str(path)!r} holds something else than a table")

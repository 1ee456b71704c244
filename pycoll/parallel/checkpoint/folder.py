"""The folder of checkpoints on disk: a name that appears by one rename is whole.

A checkpoint is written in a folder of a name that nobody reads, ``.partial-...``. When all files
are on the disk it is renamed to ``000012.step-1200``: the twelfth save, after 1,200 steps. An older
one is renamed back before it is deleted. So whatever dies at whatever moment, each folder with a
name of the second kind is a whole checkpoint, and the newest has the largest number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator

from pycoll.errors import ArgumentError

MANIFEST = "manifest.json"
PATIENCE_S = 10.0
_LOOKS = 5
_PARTIAL = ".partial-"
_NAME = re.compile(r"(\d{6,})\.step-(\d+)")


def checkpoints(path: str) -> list[str]:
    """Return the names of all whole checkpoints in a folder, the oldest first.

    None are looked for again: while a save puts a new one in place of the only one, a list of the
    folder may have neither.
    """
    for _ in range(_LOOKS):
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            text = f"{path} is no folder of checkpoints, but a file or in one"
            raise ArgumentError(text) from None
        found = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
        whole = [name for _, name in sorted(found) if os.path.isdir(os.path.join(path, name))]
        if whole:
            return whole
    return []


def candidates(path: str, if_any: bool = False, hint: str = "") -> list[str]:
    """Return the paths from which to load, the best first: of a checkpoint, or of a folder of them.

    Raises:
        ArgumentError: If there is none, unless `if_any`; with a `hint` what to do then.
    """
    if os.path.exists(os.path.join(path, MANIFEST)):
        return [path]
    found = [os.path.join(path, name) for name in reversed(checkpoints(path))]
    if not found and not if_any:
        missing = "" if os.path.isdir(path) else ", which does not exist"
        raise ArgumentError(f"there is no checkpoint in {path}{missing}{hint}")
    return found


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Make a folder if it is missing, and hold it: a save in it waits for another one's end.

    Where the file system has no locks, nothing is held.

    Raises:
        ArgumentError: If another one goes on for `PATIENCE_S`.
    """
    os.makedirs(path, exist_ok=True)
    fd, last = os.open(path, os.O_RDONLY), time.monotonic() + PATIENCE_S
    try:
        while not _held(fd):
            if time.monotonic() > last:
                raise ArgumentError(
                    f"another save in {path} goes on: give each engine and each job a folder of "
                    "its own"
                )
            time.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
        os.close(fd)


def _held(fd: int) -> bool:
    """Hold a folder, if nobody else does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks there
        pass
    return True


def begin(path: str, steps: int) -> str:
    """Make the folder of a new checkpoint and return its name; remove what others left behind.

    What cannot be deleted, as another user's, is a warning.
    The caller is `alone` in the folder. A rank of a job that was given up may still write, on
    another host: the name is like no other one, so what it writes does not end up here.
    """
    for name in os.listdir(path):
        if name.startswith(_PARTIAL):
            _clear(os.path.join(path, name))
    taken = [int(match[1]) for name in os.listdir(path) if (match := _NAME.fullmatch(name))]
    number = 1 + max(taken, default=0)
    name = f"{number:06d}.step-{steps}.{secrets.token_hex(4)}"
    os.mkdir(partial_path(path, name))
    return name


def whole_path(path: str, name: str) -> str:
    """Return where a checkpoint is once it is whole."""
    return os.path.join(path, name.rpartition(".")[0])


def discard(path: str, name: str) -> None:
    """Remove what there is of a checkpoint that does not become whole."""
    shutil.rmtree(partial_path(path, name), ignore_errors=True)


def partial_path(path: str, name: str) -> str:
    """Return where a checkpoint is until it is whole."""
    return os.path.join(path, _PARTIAL + name)


def commit(path: str, name: str, keep: int | None = None) -> None:
    """Make a checkpoint whole, whose files are on the disk; keep the newest `keep` (None: all).

    One that cannot be deleted is a warning: the new one is whole by then.
    """
    sync(partial_path(path, name))
    os.rename(partial_path(path, name), whole_path(path, name))
    sync(path)
    for old in checkpoints(path)[:-keep] if keep else ():
        _clear(os.path.join(path, old), partial_path(path, old))


def _clear(path: str, aside: str | None = None) -> None:
    """Delete what is at a path, under another name if one is given; warn if that cannot be."""
    try:
        if aside is not None:
            os.rename(path, aside)
        _remove(aside or path)
    except OSError as error:
        warnings.warn(f"{path} was not deleted: {error}", RuntimeWarning, stacklevel=2)


def _remove(path: str) -> None:
    """Delete a folder; of a link, which may lead to another disk, only itself."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync(path: str) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

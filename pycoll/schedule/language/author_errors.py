"""Errors in the functions of an algorithm's author: which algorithm, which line, and why."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pycoll.errors import CollError, ScheduleError

_OURS = Path(__file__).parents[1]  # the folder of schedules


@contextlib.contextmanager
def author_errors(title: object, function: Callable[..., Any]) -> Iterator[None]:
    """Turn whatever ``function``, called in the block, raises into a ScheduleError.

    ``sys.exit()`` too. The message begins with ``title``: what the function belongs to.
    """
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, CollError) and not isinstance(error, ScheduleError):
            raise  # of calls that the function made
        text = str(error)
        if not isinstance(error, ScheduleError):
            text = f"{type(error).__name__}: {error}{_about_vectors(text)}"
        raise ScheduleError(f"{title}: {_line(function, error)}{text}") from error


def _about_vectors(text: str) -> str:
    """Explain NumPy's errors where code for one rank is given the vector of all ranks."""
    if not any(part in text for part in ("truth value of an array", "only integer scalar arrays")):
        return ""
    return (
        "; `rank` stands for all ranks at once, as an array: choose with fold(..., "
        "where=rank == 0), and look up with np.array([...])[rank]"
    )


def _line(function: Callable[..., Any], error: BaseException) -> str:
    """Say where an error was raised: the innermost line of the author's file."""
    code = getattr(function, "__code__", None)
    if code and _OURS in Path(code.co_filename).parents:
        return ""  # a number that stands for a function
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _OURS not in Path(frame.f_code.co_filename).parents
    ]
    frames = [found for found in frames if code and found[0] == code.co_filename] or frames[-1:]
    if not frames and code:
        frames = [(code.co_filename, code.co_firstlineno)]  # it does not take these arguments
    return place(*frames[-1]) if frames else ""


def place(path: str, line: int) -> str:
    """Return the prefix of a message that names a line."""
    return f"{Path(path).name}:{line}: "


def current_line(rounds: Iterator[Any]) -> str:
    """Return the line at which a generator is suspended; empty if that is not known."""
    frame = getattr(rounds, "gi_frame", None)
    return place(frame.f_code.co_filename, frame.f_lineno) if frame else ""

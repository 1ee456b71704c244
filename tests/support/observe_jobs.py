"""Looking at a job from outside, as a user does, until it shows what it shall."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from pycoll.errors import ArgumentError
from pycoll.observe.causes import find_causes
from pycoll.observe.page import lines
from pycoll.observe.report import text
from pycoll.observe.report.analysis import analyse
from pycoll.observe.status import status
from pycoll.observe.trace.merged import merge

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = ("status",), ("top", "--every", 0.5, "--rounds", 1)
"""What looks at a running job once."""


def until(look, seconds=90.0):
    """Call `look` until it returns something true, and return that."""
    give_up = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.02)


def ready(number):
    """Whether all ranks of a job are there and make calls."""
    try:
        return all(rank.calls >= 5 for rank in status(number, 0.05).ranks)
    except (ArgumentError, IndexError):
        return False


def first_line(number):
    """Return the line that `status` and `top` print first, once something is wrong with a job."""
    with contextlib.suppress(ArgumentError):  # not begun so far
        seen = status(number)
        return lines(seen)[0][0] if find_causes(seen) else None


def told(trace):
    """Return the first line of the report on a trace, which may still be written."""
    with contextlib.suppress(ArgumentError):  # not begun so far
        return text.above(analyse(merge(trace)))[0]


def said(*words):
    """Return the first line that a command of pycoll prints on a wide terminal, be it an error."""
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "2000", "PYTHONPATH": str(ROOT)},
    )
    return (done.stdout or done.stderr).partition("\n")[0].rstrip()


def wait_for_line(pattern, look, *words):
    """Call `look` with `words` until what it returns begins with a pattern."""
    seen = []

    def fits():
        seen.append(look(*words))
        return re.match(pattern, seen[-1] or "")

    try:
        until(fits)
    except AssertionError:
        raise AssertionError(seen[-3:]) from None


def wait_for_commands(pattern, number):
    """Wait until `pycoll status` and `pycoll top` begin with a pattern."""
    wait_for_line(pattern, first_line, number)
    for name, *words in COMMANDS:
        wait_for_line(pattern, said, name, number, *words)

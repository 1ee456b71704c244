"""Real launches of small scripts; none of them needs the engine."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "pycoll", "run"]

# At the head of every script: what a test wants to know of a rank, and a way to wait.
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank, n = int(os.environ["PYCOLL_RANK"]), int(os.environ["PYCOLL_WORLD_SIZE"])
here = Path(__file__).parent
def mark(name):
    (here / f"{name}.tmp{rank}").write_text(str(os.getpid()))
    (here / f"{name}.tmp{rank}").rename(here / f"{name}.{rank}")
def wait_for(name, ranks):
    while not all((here / f"{name}.{r}").exists() for r in ranks):
        time.sleep(0.01)
"""


@dataclass
class Jobs:
    """Writes scripts and launches them.

    Attributes:
        folder: Where the scripts lie, and the marks of their ranks.
        deadline_s: Longest time that anything may take.
    """

    folder: Path
    deadline_s: float = 60.0

    def script(self, body):
        """Write a script and return its path."""
        path = self.folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(body))
        return path

    def run(self, *args, stdin=""):
        """Run a job to its end."""
        return self._complete([*RUN, *map(str, args)], {}, stdin)

    def python(self, *args, stdin="", **environ):
        """Run Python itself."""
        return self._complete([sys.executable, *map(str, args)], environ, stdin)

    def _complete(self, command, environ, stdin):
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=self.deadline_s,
        )

    @contextmanager
    def started(self, path, n, *args):
        """Start a job, wait until all its ranks have called mark("up"); yield it and their pids."""
        with subprocess.Popen(
            [*RUN, "-n", str(n), *args, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            try:
                marks = [self.folder / f"up.{rank}" for rank in range(n)]
                self.until(lambda: all(m.exists() for m in marks) or job.poll() is not None)
                yield job, [int(m.read_text()) for m in marks]
            finally:
                job.kill()

    def until(self, condition: Callable[[], bool]):
        """Wait for a condition; fail when it does not come."""
        give_up = time.monotonic() + self.deadline_s
        while not condition():
            assert time.monotonic() < give_up, "waited too long"
            time.sleep(0.01)

    def all_gone(self, pids):
        """Whether there are no such processes, or only what init has yet to reap of them."""
        return all(_state(pid) in ("", "Z", "X") for pid in pids)


def _state(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)

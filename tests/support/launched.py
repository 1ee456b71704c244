"""Jobs that a test starts, and that end with it."""

import contextlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def launched(**options):
    """Yield ``start(command)``; what it has started and still runs is killed at the end.

    Args:
        options: Of `subprocess.Popen`. Output is text in pipes.
    """
    started = []
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(command):
        started.append(subprocess.Popen(command, env=environ, **pipes, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def outcome(process):
    """Wait for a job; return its exit status and what it wrote."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err

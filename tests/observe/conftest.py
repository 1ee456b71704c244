"""Jobs with a problem, looked at from outside while they run."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, signal, time
import numpy as np
import pycoll
comm = pycoll.init(timeout=300)
rank, x = comm.rank, comm.zeros(1000)
def step():
    comm.all_reduce(x, out=x)
for _ in range(5):
    step()
"""


@pytest.fixture
def job(tmp_path):
    """Launch a program in a context, at whose end it is over."""

    @contextlib.contextmanager
    def start(n, text, *options, **environ):
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        command = [sys.executable, "-m", "pycoll", "run", "-n", str(n), *options, str(path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()  # its ranks die with it

    return start

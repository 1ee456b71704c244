"""Starting ranks, and compiling what is written by hand in C++."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path.insert(0, str(ROOT))

import pycoll
from pycoll.runtime.startup.bootstrap import launched_by_us


def compiled(folder, source, *flags):
    """Compile ``native/SOURCE`` as a shared library in a folder; return its path."""
    library = Path(folder) / Path(source).with_suffix(".so").name
    compiler = ["g++", "-O3", "-std=c++20", "-shared", "-fPIC", *flags]
    subprocess.run([*compiler, BENCHMARKS / "native" / source, "-o", library], check=True)
    return library


def measure(script, n, *words, source=None, flags=(), timeout=900):
    """Start n ranks of a script; return what its rank 0 has found, see `main`.

    Args:
        script: The script.
        n: World size.
        words: Further arguments of the function that measures.
        source: What its ranks call, in ``native/``: the last argument is then the library.
        flags: For the compiler.
        timeout: In seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [*words, compiled(folder, source, *flags)] if source else words
        command = [sys.executable, "-m", "pycoll", "run", "-n", n, "--timeout", timeout]
        subprocess.run([*map(str, [*command, script, out, *words])], check=True, cwd=ROOT)
        return json.loads(out.read_text())


def main(driver, rank):
    """Run a script: as it was called, or as one of the ranks that `measure` has started.

    Args:
        driver: What starts the ranks and writes the page.
        rank: Takes the communicator and further words, and returns what it has found.
    """
    if not launched_by_us():
        return driver()
    out, *words = sys.argv[1:]
    with pycoll.init(timeout=60, tuning="off") as comm:
        found = rank(comm, *words)
        if comm.rank == 0:
            Path(out).write_text(json.dumps(found, default=float))

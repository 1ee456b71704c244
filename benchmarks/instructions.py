"""Instructions of one call, counted by callgrind: the same on a busy machine as on an idle one.

Counted is what one `all_reduce` of 8 bytes executes in a world of one rank, from where the method
hands its arguments to the fast path until the result is there. `--library` counts with another
built library, such as one from before a change.

    python benchmarks/instructions.py
    python benchmarks/instructions.py --library /path/to/older/_C.so

It needs valgrind, and takes some 20 seconds for each of the four runs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEW, MANY = 1_000, 3_000
INSIDE = "*fast_or_slow(pycoll::*State*"
PROGRAM = """
import os, sys
import numpy as np
import pycoll
comm = pycoll.init(heap_bytes=1 << 20)
x = comm.zeros(1, np.float64)
def calls(n):
    for _ in range(n):
        comm.all_reduce(x, out=x)
calls(200)
if sys.argv[2]:
    from pycoll import _C
    trace = _C.Trace(1 << 16)
    comm._session.engine.trace(trace)
calls(int(sys.argv[1]))
os._exit(0)
"""


def executed(calls, traced, library):
    """Return the instructions of a run."""
    with tempfile.TemporaryDirectory() as folder:
        root = ROOT
        if library:  # the same Python code with another engine
            root = Path(folder) / "tree"
            shutil.copytree(ROOT / "pycoll", root / "pycoll")
            for built in (root / "pycoll").glob("_C*.so"):
                shutil.copy(library, built)
        words = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        words += [f"--toggle-collect={INSIDE}"]
        words += [sys.executable, "-c", PROGRAM, str(calls), "1" if traced else ""]
        env = {
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONHASHSEED": "0",
            "PYTHONMALLOC": "malloc",
        }
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"callgrind has counted nothing:\n{done.stderr[-2000:]}")
    return int(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, help="count with this _C*.so instead")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("it needs valgrind")
    for traced in (False, True):
        few, many = (executed(n, traced, args.library) for n in (FEW, MANY))
        name = "traced" if traced else "not traced"
        print(f"{name}: {(many - few) / (MANY - FEW):,.1f} instructions per all_reduce of 8 bytes")


if __name__ == "__main__":
    main()

"""How long ranks take to start, beside mpi4py: the whole job, and from init to the first sum.

    python benchmarks/startup.py 64 128 --mpiexec /path/to/mpich/bin/mpiexec

Every rank imports NumPy and the library, waits until all have done that and a second more, joins,
sums 8 numbers with all others, checks them and ends. Each further launcher runs the same program of
mpi4py, with the Python beside it. All of them take turns.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import pages
from harness.start import ROOT

PROGRAM = """
import os, pathlib, time
import numpy as np
{imports}
folder, count = pathlib.Path({folder!r}), {n}
(folder / f"{{os.getpid()}}.here").touch()
while len(list(folder.glob("*.here"))) < count:
    time.sleep(0.2)
time.sleep(1)
start = time.perf_counter()
{init}
total = {total}
took = time.perf_counter() - start
assert total.tolist() == [count] * 8
print(took, flush=True)
"""
OURS = {
    "imports": "import pycoll",
    "init": "comm = pycoll.init()",
    "total": "comm.all_reduce(np.ones(8))",
}
THEIRS = {
    "imports": "import mpi4py; mpi4py.rc(initialize=False, finalize=True); from mpi4py import MPI",
    "init": "MPI.Init(); comm, out = MPI.COMM_WORLD, np.empty(8)",
    "total": "(comm.Allreduce(np.ones(8), out), out)[1]",
}


def name_of(mpiexec):
    """Return what a launcher of MPI says it is, and the options that it needs here."""
    asked = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True)
    if "Open MPI" in asked.stdout:
        return "Open MPI", ["--oversubscribe", "--allow-run-as-root"]
    return "MPICH", []


def launchers(mpiexecs):
    """Return the words that start a job, its Python, and what its program does, by name."""
    found = {"pycoll": ([sys.executable, "-m", "pycoll", "run"], [], OURS)}
    for mpiexec in mpiexecs:
        name, options = name_of(mpiexec)
        found[name] = [mpiexec, *options], [mpiexec.parent / "python"], THEIRS
    return found


def seconds(n, start, python, parts):
    """Return how long a job of n ranks takes, and the slowest rank from init to its first sum."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM.format(folder=folder, n=n, **parts))
        command = [*start, "-n", n, *python, program]
        began = time.perf_counter()
        done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True, cwd=ROOT)
        return time.perf_counter() - began, max(map(float, done.stdout.split()))


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--mpiexec", type=Path, nargs="*", default=[], help="of other libraries")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    jobs, lines = launchers(args.mpiexec), []
    for n in args.ranks:
        turns = [{name: seconds(n, *job) for name, job in jobs.items()} for _ in range(args.rounds)]
        for name in jobs:
            line = [str(n), name]
            for which in (1, 0):
                took = sorted(turn[name][which] for turn in turns)
                ratios = [turn[name][which] / turn["pycoll"][which] for turn in turns]
                line.append(f"{statistics.median(took):.2f} s ({took[0]:.2f} to {took[-1]:.2f})")
                line.append(f"{statistics.median(ratios):.2f}")
            lines.append(line)
    head = ["ranks", "", "init to first sum", "of pycoll's", "the whole job", "of pycoll's"]
    print("\n".join(pages.table(head, lines)))


if __name__ == "__main__":
    main()

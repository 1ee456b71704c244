"""Instructions of one call, counted by callgrind: the same on a busy machine as on an idle one.

Counted is what one `all_reduce` of 8 bytes executes in a world of one rank, from where Python
enters the extension until the result is there. Runs of few and of many calls are subtracted, so
that what only happens at the beginning does not count.

    python benchmarks/instructions.py
    python benchmarks/instructions.py --tree /path/to/an/older/checkout --functions 20

The other checkout, which has to be built with the same flags, is counted with its own Python code,
in the same way, and functions tell where the two differ. It needs valgrind, and a library that runs
under it: one for all processors does (without `PYCOLL_ISA`). Each run takes some 20 seconds: two of
them untraced, and two traced.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "*pycoll::*::call(_object*"
FEW, MANY = 200, 600
PROGRAM = """
import os, sys
import numpy as np
import pycoll
comm = pycoll.init(heap_bytes=1 << 20)
x = comm.zeros(1, np.float64)
def make(n):
    for _ in range(n):
        comm.all_reduce(x, out=x)
make(100)
if int(sys.argv[2]):
    from pycoll import _C
    trace = _C.Trace(1 << 16)
    comm._session.engine.trace(trace)
make(int(sys.argv[1]))
os._exit(0)
"""


def executed(tree, calls, traced):
    """Return the instructions of a run, by function."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        words = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        words += [f"--toggle-collect={INSIDE}", sys.executable, "-c", PROGRAM]
        words += [str(calls), str(int(traced))]
        env = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTHONHASHSEED": "0",
        }
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise SystemExit(f"callgrind has counted nothing:\n{done.stderr[-2000:]}")
        found = by_function(out.read_text())
    if not found:
        raise SystemExit(f"callgrind has seen no call of {INSIDE}")
    return found


def by_function(text):
    """Read what callgrind has written: instructions of each function itself."""
    names, found, function, skip = {}, Counter(), "", False
    for line in text.splitlines():
        if line.startswith("fn="):
            number, name = re.fullmatch(r"fn=\((\d+)\)(?: (.*))?", line).groups()
            function = names.setdefault(number, name)
        elif line.startswith("cfn="):
            number, name = re.fullmatch(r"cfn=\((\d+)\)(?: (.*))?", line).groups()
            names.setdefault(number, name)
        elif line.startswith("calls="):
            skip = True  # the next line has what the other function took
        elif re.match(r"[-+*\d]\S* \d+$", line):
            if not skip:
                found[re.sub(r"'\d+$", "", function)] += int(line.split()[1])
            skip = False
    return found


def of_a_call(tree, traced):
    """Return the instructions of one call, by function."""
    few, many = (executed(tree, n, traced) for n in (FEW, MANY))
    return {name: (many[name] - few[name]) / (MANY - FEW) for name in many | few}


def shown(name, width=84):
    """Shorten the name of a function of C++."""
    bare = re.sub(r"\(anonymous namespace\)::|pycoll::|pybind11::|std::", "", name)
    return bare if len(bare) <= width else bare[: width - 3] + "..."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, help="count another checkout, too, and compare")
    parser.add_argument("--functions", type=int, default=12, metavar="N", help="shown at most (12)")
    parser.add_argument("--traced", action="store_true", help="count a traced call, too")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("it needs valgrind")
    now = of_a_call(ROOT, False)
    print(f"not traced: {sum(now.values()):,.1f} instructions per all_reduce of 8 bytes")
    others = {}
    if args.tree:
        others[f"in {args.tree}"] = of_a_call(args.tree.resolve(), False)
    if args.traced:
        others["traced"] = of_a_call(ROOT, True)
    for what, other in others.items():
        print(f"{what}: {sum(other.values()):,.1f}")
        changed = {f: now.get(f, 0) - other.get(f, 0) for f in now | other}
        for name in sorted(changed, key=lambda f: -abs(changed[f]))[: args.functions]:
            if abs(changed[name]) >= 0.5:
                print(f"  {changed[name]:+9.1f}  {shown(name)}")
    if not others:
        for name in sorted(now, key=lambda f: -now[f])[: args.functions]:
            print(f"  {now[name]:9.1f}  {shown(name)}")


if __name__ == "__main__":
    main()

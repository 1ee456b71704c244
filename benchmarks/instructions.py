"""Instructions of one call, counted by callgrind: the same on a busy machine as on an idle one.

Counted is what one `all_reduce` of 8 bytes executes, from where Python enters the extension until
the result is there: in a world of one rank, or on the rank that enters each
call last of two and so never waits (`--ranks 2`). Runs of few and of many calls are subtracted, so
that what only happens at the beginning does not count.

    python benchmarks/instructions.py
    python benchmarks/instructions.py --ranks 2 --functions 20
    python benchmarks/instructions.py --tree /path/to/an/older/checkout

The other checkout, which has to be built with the same flags, is counted with its own Python code,
in the same way, and functions tell where the two differ. It needs valgrind, which knows no AVX-512:
so not a library that is built for this processor alone (`PYCOLL_ISA=native`). Each run takes some
20 seconds: two of them untraced, and two traced.
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
import os, sys, time
import numpy as np
calls, ranks, traced = map(int, sys.argv[1:4])
rank = int(os.environ.get("PYCOLL_RANK", 0))
last = rank == ranks - 1
if last and len(sys.argv) > 4:
    os.execvp("valgrind", [*sys.argv[5:], sys.executable, __file__, *sys.argv[1:4]])
import pycoll
comm = pycoll.init(heap_bytes=1 << 20, timeout=600)
x = comm.zeros(1, np.float64)
def make(n):
    for _ in range(n):
        if last and ranks > 1:
            time.sleep(0.002)  # the other one is in the call
        comm.all_reduce(x, out=x)
make(100)
if traced and last:
    from pycoll import _C
    trace = _C.Trace(1 << 16)
    comm._session.engine.trace(trace)
make(calls)
pids = comm.all_gather(np.array([os.getpid()]))
while not last and os.path.exists(f"/proc/{pids[-1]}"):  # callgrind still writes
    time.sleep(0.01)
os._exit(0)
"""


def executed(tree, ranks, calls, traced):
    """Return the instructions of a run, by function."""
    with tempfile.TemporaryDirectory() as folder:
        program, out = Path(folder) / "program.py", Path(folder) / "counts"
        program.write_text(PROGRAM)
        counting = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        counting += [f"--toggle-collect={INSIDE}"]
        words = [sys.executable]
        if ranks > 1:
            words += ["-m", "pycoll", "run", "-n", str(ranks)]
        words += [str(program), str(calls), str(ranks), str(int(traced)), "--", *counting]
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


def of_a_call(tree, ranks, traced):
    """Return the instructions of one call, by function."""
    few, many = (executed(tree, ranks, n, traced) for n in (FEW, MANY))
    return {name: (many[name] - few[name]) / (MANY - FEW) for name in many | few}


def shown(name, width=84):
    """Shorten the name of a function of C++."""
    bare = re.sub(r"\(anonymous namespace\)::|pycoll::|pybind11::|std::", "", name)
    return bare if len(bare) <= width else bare[: width - 3] + "..."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--tree", type=Path, help="count another checkout, too, and compare")
    parser.add_argument("--functions", type=int, default=12, metavar="N", help="shown at most (12)")
    parser.add_argument("--traced", action="store_true", help="count a traced call, too")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("it needs valgrind")
    now = of_a_call(ROOT, args.ranks, False)
    print(f"not traced: {sum(now.values()):,.1f} instructions per all_reduce of 8 bytes")
    others = {}
    if args.tree:
        others[f"in {args.tree}"] = of_a_call(args.tree.resolve(), args.ranks, False)
    if args.traced:
        others["traced"] = of_a_call(ROOT, args.ranks, True)
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

"""Compare pycoll with the libraries that people use for the same: MPICH, Open MPI, gloo.

``python benchmarks/compare.py --quick`` takes about ten minutes, without ``--quick`` some hours.
All contestants run in turn, several rounds of them, on arrays of the same sizes; every result is
checked. It writes benchmarks/results/compare.json, .md and .png. The libraries are installed into
environments of their own under .venv-compare the first time.

``--transport mpi``, two to four minutes: pycoll sends messages over MPICH and over Open MPI, shared
memory off, beside the same MPI's own collectives. The files are called compare_mpi.
"""

import argparse
import fnmatch
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
WAITS_S = 180  # in all, for cores to be as far apart as usual
SLOW_S = 40  # who takes longer for the cells of one start, does so only once
sys.path[:0] = [str(HERE / "compare"), str(HERE.parent)]

import apart
import launch
import report

import cases
from pycoll.cli.machine import describe


def jobs(chosen, sizes):
    """Return the cells that one start of the ranks can measure: of one dtype and world size."""
    key = lambda case: (case.n, case.dtype)  # noqa: E731
    for (n, dtype), group in itertools.groupby(sorted(chosen, key=key), key):
        group = sorted(group, key=lambda case: case.collective)
        for _, some in itertools.groupby(group, lambda case: case.collective):
            yield n, dtype, [cell for case in some for cell in case.cells(sizes)]


class Comparison:
    """Runs everything, and collects the numbers of all rounds of each cell.

    ``found`` has them by contestant, world size, dtype and cell, ``skipped`` says what was left out
    and why, ``distances`` are those between the two cores at all times so far, in ns.
    """

    def __init__(self, names, budget_s, probe, apart_ns):
        self._names, self._budget_s, self._probe = names, budget_s, probe
        self.found, self.skipped, self.distances = defaultdict(list), {}, apart.look(*probe)
        self._slow, self._apart_ns, self._patience_s = set(), apart_ns, WAITS_S

    def run(self, chosen, sizes, rounds):
        """Measure the chosen cases."""
        work = list(jobs(chosen, sizes))
        begin, done, total = time.monotonic(), 0, rounds * len(work) * len(self._names)
        for i, (n, dtype, cells) in itertools.product(range(rounds), work):
            k = i % len(self._names)
            for name in self._names[k:] + self._names[:k]:
                self._start(name, n, dtype, cells)
                done += 1
                left = (time.monotonic() - begin) / done * (total - done)
                text = f"round {i + 1}/{rounds}  {cells[0]['collective']:<14} n={n}  {name:<16}"
                print(f"\r  {text}  {left / 60:4.1f} min left ", end="", flush=True)
        for (n, dtype, cells), name in itertools.product(work, self._names):
            again = [cell for cell in cells if n == 2 and self._unusual(name, dtype, cell)]
            if again:
                text = f"again  {cells[0]['collective']:<14} n=2  {name:<16}"
                print(f"\r  {text}{'':25}", end="", flush=True)
                self._start(name, 2, dtype, again)
        print(f"\r  {len(self.found)} cells in {(time.monotonic() - begin) / 60:.1f} min{'':60}")

    @property
    def usual_ns(self):
        """The usual distance, or what was asked for."""
        return self._apart_ns or statistics.median(self.distances)

    def _key(self, name, n, dtype, cell):
        return name, n, dtype, *(cell[k] for k in report.KEYS)

    def _unusual(self, name, dtype, cell):
        """Whether a cell was measured, but never at the usual distance."""
        seen = self.found.get(self._key(name, 2, dtype, cell), ())
        return seen and not any(apart.is_usual(c["apart_ns"], self.usual_ns) for c in seen)

    def _start(self, name, n, dtype, cells):
        """Measure some cells in one start of a contestant."""
        once = (name, n, cells[0]["collective"], dtype)
        if (name, dtype) in self.skipped or once in self._slow:
            return
        job = {"dtype": dtype, "cells": cells, "budget_s": self._budget_s}
        job |= {"usual_ns": self.usual_ns, "apart": None}
        if n == 2:
            job["apart"] = list(map(str, self._probe))
            self._patience_s -= apart.wait(*self._probe, self.usual_ns, self._patience_s)
            apart.reset(self._probe[1])
        start = time.monotonic()
        got, why = launch.run(name, n, job, 60 + 2 * len(cells))
        if time.monotonic() - start > SLOW_S:
            self._slow.add(once)
        for cell in got:
            self.found[self._key(name, n, dtype, cell)].append(cell)
            self.distances += [cell["apart_ns"]] * (n == 2)
        if why is not None and not got:
            self.skipped[name, dtype] = why
        elif why is not None:
            print(f"\n{name}, {n} ranks, {cells[len(got)]}: {why}")


def arguments():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the cases of ten minutes")
    parser.add_argument("--rounds", type=int, default=3, help="of all contestants in turn (3)")
    parser.add_argument("--budget", type=float, default=0.03, metavar="S", help="for a cell (0.03)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases whose title matches")
    parser.add_argument("--with", dest="names", metavar="A,B", help="these contestants only")
    parser.add_argument(
        "--transport",
        choices=launch.LINEUPS,
        default="shm",
        help="mpi: pycoll over MPI by messages",
    )
    parser.add_argument("--max", type=int, default=64, metavar="MIB", help="largest size (64)")
    parser.add_argument(
        "--apart", type=float, metavar="NS", help="take this for the usual distance of two cores"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--name", help="of the files that are written")
    return parser


def main():
    """Run from the command line."""
    parser = arguments()
    args = parser.parse_args()
    over_mpi = args.transport == "mpi"
    names = args.names.split(",") if args.names else list(launch.LINEUPS[args.transport])
    unknown = sorted(set(names) - set(launch.HOMES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(launch.HOMES)}")
    skipped = {(name, "all"): why for name, why in launch.set_up(names).items()}
    names = [name for name in names if (name, "all") not in skipped]
    chosen = cases.messages() if over_mpi else cases.quick() if args.quick else cases.full()
    chosen = [case for case in chosen if fnmatch.fnmatch(case.title, f"*{args.only}*")]
    sizes = cases.FEW_SIZES if args.quick else (*cases.SIZES[::2], 64 << 20)
    sizes = cases.MESSAGE_SIZES if over_mpi else sizes
    sizes = [size for size in sizes if size <= args.max << 20]
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(names, args.budget, apart.build(folder), args.apart)
        try:
            comparison.run(chosen, sizes, args.rounds)
        except KeyboardInterrupt:
            print("\n  interrupted; the report has what was measured so far")
    skipped |= comparison.skipped | {(name, "all"): why for name, why in launch.NEVER.items()}
    document = {
        "command": "python benchmarks/compare.py " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "versions": launch.versions(names),
        "rounds": args.rounds,
        "skipped": [{"who": who, "dtype": d, "why": why} for (who, d), why in skipped.items()],
        "usual_ns": round(comparison.usual_ns, 1),
        "cells": report.merge(comparison.found, comparison.usual_ns),
    }
    report.write(document, args.out / (args.name or ("compare_mpi" if over_mpi else "compare")))


if __name__ == "__main__":
    main()

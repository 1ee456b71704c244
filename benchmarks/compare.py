"""Compare pycoll with the libraries that people use for the same: MPICH, Open MPI, gloo.

``python benchmarks/compare.py --quick`` takes about ten minutes, without ``--quick`` some hours.
The ranks of all contestants are started together and take turns, cell by cell, on arrays of the
same sizes, for several rounds; every result is checked. Each round is a start of its own, since how
fast memory is depends on the pages that a process happens to get. It writes compare.json, .md and
.png to benchmarks/results. The libraries are installed into environments of their own under
.venv-compare the first time.

``--transport mpi``: pycoll sends messages over MPICH and over Open MPI, shared
memory off, beside the same MPI's own collectives. The files are called compare_mpi.

``--limits``: beside them ranks that only pass over their own arrays, reading what a collective must
read and writing what it must write. No library can be faster than that, so it tells how many times
as fast as its peers pycoll could be at most.
"""

import fnmatch
import itertools
import math
import operator
import signal
import sys
import time
from pathlib import Path

from harness import pages

SLOW_S = 0.5  # whose call takes longer has one turn in that cell, and none at larger sizes
TURN_S = 120
sys.path.insert(0, str(Path(__file__).with_name("compare")))

import launch
import report
from contestants import CONTESTANTS, LIMITS, LINEUPS

import cases


def jobs(chosen, sizes):
    """Return the cells that one start of the ranks can measure: of one dtype and world size."""
    key = operator.attrgetter("n", "dtype")
    for (n, dtype), group in itertools.groupby(sorted(chosen, key=key), key):
        yield n, dtype, [cell for case in group for cell in case.cells(sizes)]


class Comparison:
    """Runs everything, and collects the numbers of all rounds of each cell.

    ``found`` has them by contestant, world size, dtype and cell, None for a round in which a cell
    was left out; ``skipped`` says what was left out altogether and why.
    """

    def __init__(self, names, budget_s, rounds):
        self._names, self._budget_s, self._rounds = names, budget_s, rounds
        self.found, self.skipped = {}, {}
        self._slow, self._ranks = {}, {}

    def run(self, chosen, sizes):
        work = list(jobs(chosen, sizes))
        total = self._rounds * sum(len(cells) for _, _, cells in work)
        begin, done = time.monotonic(), 0
        for (n, dtype, cells), i in itertools.product(work, range(self._rounds)):
            try:
                self._start(n, dtype, cells)
                for cell in cells:
                    for name in self._in_turn(i):
                        self._measure(name, n, dtype, cell, i)
                    done += 1
                    left = (time.monotonic() - begin) / done * (total - done)
                    text = f"n={n} {dtype}  round {i + 1}/{self._rounds}  {cell['collective']:<14}"
                    print(f"\r  {text} {left / 60:4.1f} min left ", end="", flush=True)
            finally:
                for ranks in self._ranks.values():
                    ranks.dismiss()
                for ranks in self._ranks.values():
                    ranks.end()
                self._ranks = {}
        print(f"\r  {len(self.found)} cells in {(time.monotonic() - begin) / 60:.1f} min{'':60}")

    def _in_turn(self, i):
        k = i % len(self._names)
        return self._names[k:] + self._names[:k]

    def _start(self, n, dtype, cells):
        job = {"dtype": dtype, "cells": cells, "budget_s": self._budget_s}
        for name in self._names:
            if (name, dtype) in self.skipped or (name, f"{dtype}, {n} ranks") in self.skipped:
                continue
            self._ranks[name] = launch.Ranks(name, n, job)
        for name in list(self._ranks):
            try:
                self._ranks[name].await_start()
            except launch.Stopped as why:
                self.skipped[name, dtype] = str(why)
                self._ranks.pop(name).end()

    def _measure(self, name, n, dtype, cell, i):
        """Give a contestant its turn."""
        key = (name, n, dtype, *(cell[k] for k in report.KEYS))
        case = (name, n, dtype, *(cell[k] for k in report.KEYS if k != "bytes"))
        if name not in self._ranks or cell["bytes"] >= self._slow.get(case, math.inf):
            return
        try:
            answer = self._ranks[name].measure(cell, TURN_S)
        except launch.Stopped as why:
            self.skipped[name, f"{dtype}, {n} ranks"] = f"from {cell} on: {why}"
            self._ranks.pop(name).end()
            return
        if answer["median_us"] > SLOW_S * 1e6:
            self._slow[case] = cell["bytes"]
        row = self.found.setdefault(key, {"rounds_us": [None] * self._rounds, "wrong": 0})
        row["rounds_us"][i] = round(answer["median_us"], 3)
        row["wrong"] += answer["wrong"]


def arguments():
    parser = pages.arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="the cases of ten minutes")
    parser.add_argument("--rounds", type=int, default=3, help="of all contestants in turn (3)")
    parser.add_argument(
        "--budget", type=float, default=0.03, metavar="S", help="for a turn of two (0.03)"
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases whose title matches")
    parser.add_argument("--with", dest="names", metavar="A,B", help="these contestants only")
    messages = "mpi: pycoll over MPI by messages"
    parser.add_argument("--transport", choices=LINEUPS, default="shm", help=messages)
    parser.add_argument("--limits", action="store_true", help="tell what is possible at most")
    parser.add_argument("--max", type=int, default=64, metavar="MIB", help="largest size (64)")
    parser.add_argument("--out", type=Path, default=pages.RESULTS, help="folder for the results")
    parser.add_argument("--name", help="of the files that are written")
    return parser


def main():
    parser = arguments()
    args = parser.parse_args()
    over_mpi = args.transport == "mpi"
    names = args.names.split(",") if args.names else list(LINEUPS[args.transport])
    names += LIMITS if args.limits else ()
    if unknown := sorted(set(names) - set(CONTESTANTS)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(CONTESTANTS)}")
    skipped = {(name, "all"): why for name, why in launch.set_up(names).items()}
    names = [name for name in names if (name, "all") not in skipped]
    chosen = cases.messages() if over_mpi else cases.quick() if args.quick else cases.full()
    chosen = [case for case in chosen if fnmatch.fnmatch(case.title, f"*{args.only}*")]
    sizes = cases.FEW_SIZES if args.quick else (*cases.SIZES[::2], 64 << 20)
    sizes = cases.MESSAGE_SIZES if over_mpi else sizes
    sizes = [size for size in sizes if size <= args.max << 20]
    comparison = Comparison(names, args.budget, args.rounds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no rank is left behind
    try:
        comparison.run(chosen, sizes)
    except KeyboardInterrupt:
        print("\n  interrupted; the report has what was measured so far")
    skipped |= comparison.skipped | {(name, "all"): why for name, why in launch.NEVER.items()}
    document = pages.facts() | {
        "versions": launch.versions(names),
        "rounds": args.rounds,
        "skipped": [{"who": who, "dtype": d, "why": why} for (who, d), why in skipped.items()],
        "cells": report.merge(comparison.found),
    }
    report.write(document, args.out / (args.name or ("compare_mpi" if over_mpi else "compare")))


if __name__ == "__main__":
    main()

"""Measure what pycoll adds to the least that is needed, and compare it with the project's bars.

``python benchmarks/overhead.py`` takes half a minute on two idle cores; where they are not idle it
waits and tries again, and says how much others used them. It prints a table and writes
benchmarks/results/overhead.md and .json.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import pages, start
from harness.pages import Others
from harness.ranks import batches, contest, contestants

from pycoll.schedule.ir import IN, OUT, algorithm, at, fold

IMPORTS = 9
QUIET = 0.03  # share of the cores that others may use during a measurement
PATIENCE_S = 60.0  # for cores to become idle

# --- What ranks measure ---------------------------------------------------------------------------


def calls_in_place(comm, x, calls, runs):
    """Return microseconds of an all_reduce in place."""
    batches(comm, lambda: comm.all_reduce(x, out=x), 5 * calls, 3)
    found = batches(comm, lambda: comm.all_reduce(x, out=x), calls, runs) * 1e6
    return {
        "median_us": np.median(found),
        "best_us": found.min(),
        "p99_us": np.percentile(found, 99),
    }


def small_call(comm):
    """8 bytes in place, ordinary memory."""
    return calls_in_place(comm, np.zeros(2, np.float32), 200, 201)


def crowded(comm):
    """64 KiB in place in symmetric memory, more ranks than cores."""
    return calls_in_place(comm, comm.zeros(16 << 10, np.float32), 50, 41)


def against_limit(comm, library):
    """1 MiB of float32 in place in symmetric memory beside the plain loop, in turn."""
    calls = 80
    ways = contestants(comm, library, 1 << 20, calls)
    del ways["ordinary"]
    found = contest(comm, ways, 41)
    mine, plain = (np.array(found[name]) for name in ("symmetric", "plain"))
    plain /= calls
    return {
        "pycoll_us": np.median(mine) * 1e6,
        "plain_us": np.median(plain) * 1e6,
        "speed": np.median(plain) / np.median(mine),
        "speed_quartiles": list(np.percentile(plain / mine, [25, 75])),
    }


def chain(lines):
    """An all-reduce of one rank with so many folds, all but the first of empty chunks."""

    @algorithm("all_reduce", f"chain{lines}", chunks=lines)
    def rounds(rank, n):
        """Copy chunk by chunk; made to time the interpreter."""
        for chunk in range(lines):
            yield fold(at(rank, IN, chunk), to=at(rank, OUT, chunk))

    return rounds


def step_cost(comm):
    """Nanoseconds for one more instruction: a plan of many empty folds against one of few."""
    x = comm.empty(1, np.float32)
    out = comm.empty(1, np.float32)
    x[:] = 1
    few, many = chain(64), chain(4096)

    def seconds(which):
        return batches(comm, lambda: comm.all_reduce(x, out=out, algorithm=which), 20, 101)

    seconds(few), seconds(many)
    found = (np.median(seconds(many)) - np.median(seconds(few))) / (4096 - 64)
    return {"ns": found * 1e9}


def waiting(comm):
    """Share of a core that a rank uses while it waits, from 10 ms after it began to."""
    samples = []

    def sample():
        time.sleep(0.010)
        start, busy = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        samples.append((time.process_time() - busy) / (time.perf_counter() - start))

    comm.barrier()
    if comm.rank == 0:
        observer = threading.Thread(target=sample)
        observer.start()
        comm.barrier()
        observer.join()
    else:
        time.sleep(1.2)
        comm.barrier()
    return {"share": samples[0] if samples else None}


def overlap(comm):
    """Part of a 128 MiB all-reduce that hides behind work elsewhere, and behind work of a core."""
    x = comm.empty(32 << 20, np.float32)
    x[:] = 0

    def compute(seconds):
        end, y = time.perf_counter() + seconds, np.ones(4096)
        while time.perf_counter() < end:
            np.sqrt(y, out=y)

    def both(work, seconds):
        handle = comm.all_reduce(x, out=x, async_op=True)
        work(seconds)
        handle.wait()

    def apart(work, seconds):
        comm.all_reduce(x, out=x)
        work(seconds)

    def once(call, *args):
        return batches(comm, lambda: call(*args), 1, 1)[0]

    alone = float(np.median([once(apart, lambda seconds: None, 0.0) for _ in range(11)]))
    found = {"all_reduce_ms": alone * 1e3}
    for name, work in (("elsewhere", time.sleep), ("on_core", compute)):
        pairs = [(once(apart, work, alone), once(both, work, alone)) for _ in range(15)]
        found[name] = float(np.median([a - b for a, b in pairs])) / alone
    return found


MEASUREMENTS = {
    function.__name__: function
    for function in (small_call, crowded, against_limit, step_cost, waiting, overlap)
}


def rank(comm, name, *words):
    return MEASUREMENTS[name](comm, *words)


# --- The table ------------------------------------------------------------------------------------


class Bar(NamedTuple):
    measure: Callable[[], dict]
    key: str  # of the number that counts
    show: Callable[[dict], str]
    limit: float
    wanted: str  # the limit in words; one that begins with > is met from there on

    def met(self, found):
        value = found[self.key]
        return value >= self.limit if self.wanted.startswith(">") else value <= self.limit


def ranks(n, function, source=None):
    return lambda: start.measure(__file__, n, function.__name__, source=source, timeout=180)


def import_time():
    """Time to import pycoll where NumPy is imported already; fresh processes, compiled sources."""
    text = (
        "import numpy, time; t = time.perf_counter(); import pycoll; print(time.perf_counter() - t)"
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        # An installed package has its bytecode beside it; where writing it is switched off, every
        # import of this checkout would compile all sources again.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        options = {"capture_output": True, "text": True, "cwd": start.ROOT, "env": environment}
        for _ in range(1 + IMPORTS):
            done = subprocess.run([sys.executable, "-c", text], check=True, **options)
            found.append(float(done.stdout) * 1e3)
    del found[0]  # wrote the bytecode
    return {"median_ms": statistics.median(found), "worst_ms": max(found)}


def microseconds(found):
    return f"{found['median_us']:.2f} us (best {found['best_us']:.2f}, p99 {found['p99_us']:.2f})"


def beside_plain(f):
    return f"{f['speed']:.2f} ({f['pycoll_us']:.1f} us, plain {f['plain_us']:.1f} us)"


def hidden(f):
    return f"{f['elsewhere']:.0%} (behind work on the same cores: {f['on_core']:.0%})"


def imported(f):
    return f"{f['median_ms']:.0f} ms (worst of {IMPORTS}: {f['worst_ms']:.0f})"


PLAIN = ranks(2, against_limit, "limit_all_reduce.cpp")
BARS = {
    "8 B `all_reduce` in place, 2 ranks, from Python": Bar(
        ranks(2, small_call), "median_us", microseconds, 1.0, "<= 1.0 us"
    ),
    "1 MiB float32 sum in symmetric memory, 2 ranks: speed beside a plain C++ loop": Bar(
        PLAIN, "speed", beside_plain, 0.9, ">= 0.90"
    ),
    "one more step of a plan (an empty fold)": Bar(
        ranks(1, step_cost), "ns", lambda f: f"{f['ns']:.1f} ns", 30.0, "<= 30 ns"
    ),
    "64 KiB `all_reduce` in symmetric memory, 8 ranks on 2 cores": Bar(
        ranks(8, crowded), "median_us", microseconds, 120.0, "<= 120 us"
    ),
    "share of a core that a waiting rank uses after 10 ms": Bar(
        ranks(2, waiting), "share", lambda f: f"{f['share']:.1%}", 0.10, "< 10 %"
    ),
    "`import pycoll` beyond NumPy": Bar(import_time, "median_ms", imported, 150.0, "<= 150 ms"),
    "part of a 128 MiB `all_reduce` that `async_op` hides behind work elsewhere": Bar(
        ranks(2, overlap), "elsewhere", hidden, 0.8, ">= 80 %"
    ),
}


def undisturbed(measure, tries):
    """Measure when the cores are idle, and again when they were not; keep the least disturbed."""
    found = []
    while len(found) < tries and not (found and found[-1]["others"] <= QUIET):
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            before = Others()
            time.sleep(1.0)
            if before.share() <= QUIET:
                break
        others = Others()
        found.append(measure())
        found[-1]["others"] = others.share()
    return min(found, key=lambda f: f["others"])


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only bars whose name has it")
    parser.add_argument("--tries", type=int, default=5, help="for a measurement that is disturbed")
    parser.add_argument("--out", type=Path, default=pages.RESULTS, help="folder for the results")
    args = parser.parse_args()
    rows, lines = [], []
    for name, bar in ((name, bar) for name, bar in BARS.items() if args.only in name):
        found = undisturbed(bar.measure, args.tries)
        met, others = bar.met(found), f"{found['others']:.0%}"
        lines.append([name, bar.show(found), bar.wanted, "yes" if met else "**no**", others])
        rows.append({"name": name, "bar": bar.wanted, "met": met, "measured": found})
        print(f"{len(rows)} of {len(BARS)}: {' | '.join(lines[-1])}", flush=True)
    if not args.only:
        about = "Others: the share of the cores that other processes used during the measurement."
        lines = pages.table(["what", "measured", "bar", "met", "others"], lines)
        pages.write(args.out / "overhead", "Overhead", about, lines, rows=rows)


if __name__ == "__main__":
    start.main(main, rank)

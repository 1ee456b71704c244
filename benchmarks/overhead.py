"""Measure what pycoll adds to the least that is needed, and compare it with the project's bars.

``python benchmarks/overhead.py`` takes half a minute on two idle cores; where they are not idle it
waits and tries again, and says how much others used them. It prints a table and writes
benchmarks/results/overhead.md and .json.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycoll.cli.common.machine import describe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
IMPORTS = 9
QUIET = 0.03  # share of the cores that others may use during a measurement
PATIENCE_S = 60.0  # for cores to become idle


@dataclass(frozen=True)
class Bar:
    """One line of the table: what to measure, and what is wanted of it."""

    name: str
    measure: Callable[[Path], dict[str, Any]]
    key: str  # of the number that counts
    show: Callable[[dict[str, Any]], str]
    limit: float
    wanted: str
    at_least: bool = False

    def met(self, found: dict[str, Any]) -> bool:
        value = found[self.key]
        return value >= self.limit if self.at_least else value <= self.limit


def ranks(n: int, name: str, *args: str) -> Callable[[Path], dict[str, Any]]:
    """Return what runs one measurement of overhead_ranks.py on n ranks."""

    def measure(folder: Path) -> dict[str, Any]:
        out = folder / f"{name}.json"
        given = [arg.format(folder=folder) for arg in args]
        command = ["-m", "pycoll", "run", "-n", str(n), "--timeout", "180"]
        script = str(HERE / "overhead_ranks.py")
        subprocess.run([sys.executable, *command, script, name, out, *given], check=True, cwd=ROOT)
        return json.loads(out.read_text())

    return measure


def against_limit(folder: Path) -> dict[str, Any]:
    """Compile the plain loop as a library and let two ranks run it in turn with pycoll."""
    source, library = HERE / "native" / "limit_all_reduce.cpp", folder / "limit.so"
    flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-DLIMIT_AS_LIBRARY"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return ranks(2, "against_limit", "{folder}/limit.so")(folder)


def import_time(folder: Path) -> dict[str, Any]:
    """Time to import pycoll where NumPy is imported already; fresh processes, compiled sources."""
    text = (
        "import numpy, time; t = time.perf_counter(); import pycoll; print(time.perf_counter() - t)"
    )
    command = [sys.executable, "-c", text]
    # An installed package has its bytecode beside it; where writing it is switched off, every
    # import of this checkout would compile all sources again.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = []
    for _ in range(1 + IMPORTS):
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment
        )
        found.append(float(done.stdout) * 1e3)
    del found[0]  # wrote the bytecode
    return {"median_ms": statistics.median(found), "worst_ms": max(found)}


def microseconds(found: dict[str, Any]) -> str:
    return f"{found['median_us']:.2f} us (best {found['best_us']:.2f}, p99 {found['p99_us']:.2f})"


BARS = (
    Bar(
        "8 B `all_reduce` in place, 2 ranks, from Python",
        ranks(2, "small_call"),
        "median_us",
        microseconds,
        1.0,
        "<= 1.0 us",
    ),
    Bar(
        "1 MiB float32 sum in symmetric memory, 2 ranks: speed beside a plain C++ loop",
        against_limit,
        "speed",
        lambda f: f"{f['speed']:.2f} ({f['pycoll_us']:.1f} us, plain {f['plain_us']:.1f} us)",
        0.9,
        ">= 0.90",
        at_least=True,
    ),
    Bar(
        "one more step of a plan (an empty fold)",
        ranks(1, "step_cost"),
        "ns",
        lambda f: f"{f['ns']:.1f} ns",
        30.0,
        "<= 30 ns",
    ),
    Bar(
        "64 KiB `all_reduce` in symmetric memory, 8 ranks on 2 cores",
        ranks(8, "crowded"),
        "median_us",
        microseconds,
        120.0,
        "<= 120 us",
    ),
    Bar(
        "share of a core that a waiting rank uses after 10 ms",
        ranks(2, "waiting"),
        "share",
        lambda f: f"{f['share']:.1%}",
        0.10,
        "< 10 %",
    ),
    Bar(
        "`import pycoll` beyond NumPy",
        import_time,
        "median_ms",
        lambda f: f"{f['median_ms']:.0f} ms (worst of {IMPORTS}: {f['worst_ms']:.0f})",
        150.0,
        "<= 150 ms",
    ),
    Bar(
        "part of a 128 MiB `all_reduce` that `async_op` hides behind work elsewhere",
        ranks(2, "overlap"),
        "elsewhere",
        lambda f: f"{f['elsewhere']:.0%} (behind work on the same cores: {f['on_core']:.0%})",
        0.8,
        ">= 80 %",
        at_least=True,
    ),
)


class Others:
    """The share of the cores that other processes, and other guests of the host, have used."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        busy, ours, total = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - ours) / max(total, 1e-9)

    def _now(self) -> tuple[float, float, float]:
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(text) for text in lines.readline().split()[1:9]]
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        idle = (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return total - idle, sum(u.ru_utime + u.ru_stime for u in used), total


def undisturbed(measure: Callable[[Path], dict[str, Any]], folder: Path, tries: int) -> dict:
    """Measure when the cores are idle, and again when they were not; keep the least disturbed."""
    found: list[dict[str, Any]] = []
    while len(found) < tries and not (found and found[-1]["others"] <= QUIET):
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            before = Others()
            time.sleep(1.0)
            if before.share() <= QUIET:
                break
        others = Others()
        found.append(measure(folder))
        found[-1]["others"] = others.share()
    return min(found, key=lambda f: f["others"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only bars whose name has it")
    parser.add_argument("--tries", type=int, default=5, help="for a measurement that is disturbed")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    args = parser.parse_args()
    machine = describe()
    head = ["| what | measured | bar | met | others |", "|---|---|---|---|---|"]
    print("\n".join(head), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for bar in (bar for bar in BARS if args.only in bar.name):
            found = undisturbed(bar.measure, Path(folder), args.tries)
            met = bar.met(found)
            cells = (bar.name, bar.show(found), bar.wanted, _yes(met), f"{found['others']:.0%}")
            head.append(f"| {' | '.join(cells)} |")
            rows.append({"name": bar.name, "bar": bar.wanted, "met": met, "measured": found})
            print(head[-1], flush=True)
    if not args.only:
        _save(args.out, machine, head, rows)


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


def _save(out: Path, machine: dict[str, Any], table: list[str], rows: list[dict]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/overhead.py"
    date = time.strftime("%Y-%m-%d")
    about = (
        f"`{command}`, {date}, {machine['cores']} cores of {machine['cpu']}"
        f"{' (virtual)' if machine['virtual'] else ''}, {platform.system()} {machine['kernel']}, "
        f"pycoll {machine['pycoll']} at {machine['commit'] or 'no commit'}, Python "
        f"{machine['python']}, NumPy {machine['numpy']}, folds with {machine['folds']}."
    )
    note = "Others: the share of the cores that other processes used during the measurement."
    (out / "overhead.md").write_text("\n".join([about, note, "", *table, ""]), encoding="utf-8")
    document = {"command": command, "date": date, "machine": machine, "rows": rows}
    (out / "overhead.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

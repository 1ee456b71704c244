"""Fail if pycoll has become slower: ``python benchmarks/check.py`` (``make bench-check``).

It measures all_reduce of two ranks beside the plain C++ loop that does nothing else, and compares
the ratios with those of benchmarks/baseline.json, one-sidedly: a cell fails when it is below its
baseline by more than the noise that is stated there, in every one of several tries. Ratios hold on
machines of one kind: the baseline has those of some, told apart by processor and instruction set.
On another kind nothing can fail; ``--update`` writes its baseline, or writes it anew.
"""

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
BASELINE = HERE / "baseline.json"
NOISE = 0.25
TRIES = 4

import beside

from pycoll.cli.common.machine import describe
from pycoll.cli.measure.bench_report import sized


def measure():
    """Return {"1048576 symmetric": ratio}."""
    flag, source = "-DLIMIT_AS_LIBRARY", "limit_all_reduce.cpp"
    found = beside.measure([2], "check_ranks.py", source, flag, timeout=180)[2]
    return {
        f"{nbytes} {memory}": row[memory]
        for nbytes, row in found.items()
        for memory in ("symmetric", "ordinary")
    }


def kind_of(machine):
    """Return the kind of machine, to which ratios belong."""
    return f"{machine['cpu']}, {machine['folds']}"


def best(old, new):
    """Return the better of two tries, cell by cell."""
    return {key: max(value, old.get(key, 0.0)) for key, value in new.items()}


def show(found, wanted):
    """Print the table; return the cells that are too slow."""
    print("| size | memory | of the plain loop's speed | baseline | |\n|---|---|---|---|---|")
    slow = []
    for key, value in found.items():
        nbytes, memory = key.split()
        limit = wanted.get(key, 0.0) * (1 - NOISE)
        mark = "" if value >= limit else "**slower**"
        slow += [key] if mark else []
        base = f"{wanted[key]:.2f}" if key in wanted else "none"
        print(f"| {sized(int(nbytes))} | {memory} | {value:.2f} | {base} | {mark} |")
    return slow


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the baseline")
    args = parser.parse_args()
    about = {"date": time.strftime("%Y-%m-%d"), "machine": describe(), "noise": NOISE}
    kind = kind_of(about["machine"])
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    wanted = baseline.get(kind, {}).get("ratios", {})
    if not wanted and not args.update:
        known = "; ".join(baseline)
        print(f"no baseline of {kind}, so nothing can fail; --update writes one (known: {known})")
    found = {}
    for attempt in range(TRIES):
        found = best(found, measure())
        good = all(found[key] >= wanted.get(key, 0.0) * (1 - NOISE) for key in found)
        if good and not args.update:
            break
        print(f"try {attempt + 1} of {TRIES}", file=sys.stderr)
    slow = show(found, wanted)
    if args.update:
        baseline[kind] = about | {"ratios": {key: round(found[key], 3) for key in found}}
        BASELINE.write_text(json.dumps(baseline, indent=1) + "\n", encoding="utf-8")
    elif slow:
        sys.exit(f"slower than the baseline by more than {NOISE:.0%}: {', '.join(slow)}")


if __name__ == "__main__":
    main()

"""Fail if pycoll has become slower: ``python benchmarks/check.py`` (``make bench-check``).

It measures all_reduce of two ranks beside the plain C++ loop that does nothing else, and compares
the ratios with those of benchmarks/baseline.json, one-sidedly: a cell fails when it is below its
baseline by more than the noise that is stated there, in every one of several tries. Ratios hold on
machines of one kind: the baseline has those of some, told apart by processor and instruction set.
On another kind nothing can fail; ``--update`` writes its baseline, or writes it anew.
"""

import json
import statistics
import sys

from harness import pages, start
from harness.ranks import batches, contestants

from pycoll.cli.common.text import sized

BASELINE = start.BENCHMARKS / "baseline.json"
NOISE = 0.25
TRIES = 4
SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)
ROUNDS = 15
TURN_BYTES = 32 << 20  # a turn moves about so much, and makes at least 4 calls, at most 500


def rank(comm, library):
    """Return the speed of pycoll as a part of that of the plain loop: {"8 symmetric": ratio}."""
    found = {}
    for nbytes in SIZES:
        calls = int(min(500, max(4, TURN_BYTES // nbytes)))
        ways = contestants(comm, library, nbytes, calls)
        rows = {name: [] for name in ways}
        for _ in range(ROUNDS):  # in one order, without a start to warm up: as the baselines are
            for name, (call, times) in ways.items():
                rows[name] += list(batches(comm, call, times, 1))
        seconds = {name: statistics.median(row) for name, row in rows.items()}
        for name in ("symmetric", "ordinary"):
            found[f"{nbytes} {name}"] = seconds["plain"] / calls / seconds[name]
    return found


def show(found, wanted):
    """Print the table; return the cells that are too slow."""
    lines, slow = [], []
    for key, value in found.items():
        nbytes, memory = key.split()
        mark = "" if value >= wanted.get(key, 0.0) * (1 - NOISE) else "**slower**"
        slow += [key] if mark else []
        base = f"{wanted[key]:.2f}" if key in wanted else "none"
        lines.append([sized(int(nbytes)), memory, f"{value:.2f}", base, mark])
    head = ["size", "memory", "of the plain loop's speed", "baseline", ""]
    print("\n".join(pages.table(head, lines)))
    return slow


def main():
    parser = pages.arguments(__doc__)
    parser.add_argument("--update", action="store_true", help="write the baseline")
    args = parser.parse_args()
    about = pages.facts() | {"noise": NOISE}
    kind = f"{about['machine']['cpu']}, {about['machine']['folds']}"
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    wanted = baseline.get(kind, {}).get("ratios", {})
    if not wanted and not args.update:
        known = "; ".join(baseline)
        print(f"no baseline of {kind}, so nothing can fail; --update writes one (known: {known})")
    found = {}
    for attempt in range(TRIES):
        tried = start.measure(__file__, 2, source="limit_all_reduce.cpp", timeout=180)
        found = {key: max(value, found.get(key, 0.0)) for key, value in tried.items()}
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
    start.main(main, rank)

"""More ranks than cores beside the least that they do: ``python benchmarks/crowd.py``.

Ranks that share a core can only take turns on it, so a small call costs what it takes the kernel to
go from process to process, as often as ranks have to. The least is a barrier by hand, in which a
rank raises a flag and yields until it sees those of all others: in a loop in C, and called from
Python, whose code and data the caches lose with every switch. Sums in place stand beside the same
by hand: in memory that all ranks map, and staged, in the segments that suit it best. All take turns
in the same processes. Takes two minutes; writes results/crowd.md and .json.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import beside
import pages

from pycoll.cli.measure.bench_report import sized

WORLDS = (2, 4, 8)


def spread(values):
    """Return the median, and the middle half in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def small(found):
    """Return the table of calls that move next to nothing."""
    heads = [f"{n} ranks us | switches" for n in found]
    lines = [f"| what | {' | '.join(heads)} |", "|---" * (1 + 2 * len(found)) + "|"]
    for name in next(iter(found.values()))["barriers"]:
        cells = [name]
        for table in found.values():
            rounds = table["barriers"][name]
            cells += [spread(rounds["us"]), f"{statistics.median(rounds['switches']):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def times(table, ours, theirs):
    """Return how long the best by hand takes as a part of our time, the median of the rounds."""
    own = table[ours]["us"]
    return min(
        statistics.median(other / mine for other, mine in zip(rounds["us"], own, strict=True))
        for name, rounds in table.items()
        if name.startswith(theirs)
    )


def large(found):
    """Return the table of sums."""
    head = "| ranks | size | symmetric us | by hand: x | ordinary us | staged by hand: x |"
    lines = [head, "|---" * 6 + "|"]
    for n, tables in found.items():
        for nbytes, table in tables.items():
            if nbytes == "barriers":
                continue
            cells = [str(n), sized(int(nbytes)), spread(table["symmetric"]["us"])]
            cells.append(f"{times(table, 'symmetric', 'symmetric by hand'):.2f}")
            cells.append(spread(table["ordinary"]["us"]))
            cells.append(f"{times(table, 'ordinary', 'staged'):.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="crowd", help="of the files that are written")
    name = parser.parse_args().name
    found = beside.measure(WORLDS, "crowd_ranks.py", "limit_crowd.cpp", "-march=native")
    about = (
        "Microseconds a call on the slowest rank: median of the rounds, and their middle half. "
        "Switches: how often rank 0 gives its core to another process in a call. x: the time by "
        "hand as a part of pycoll's, the median of rounds that took all in turn; above 1, pycoll "
        "is faster. Sums are of float32, in place, of the same array again."
    )
    lines = ["## Next to nothing", "", *small(found), "## Sums", "", *large(found)]
    pages.write(name, "crowd.py", "More ranks than cores", about, lines, ranks=found)


if __name__ == "__main__":
    main()

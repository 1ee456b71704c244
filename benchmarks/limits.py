"""Ordinary arrays beside the same by hand, on two ranks: ``python benchmarks/limits.py``.

What is compared, in the same two processes, in turn: pycoll, which takes ordinary arrays through
cells or has the kernel copy them, whichever is faster; pycoll through cells; the same by hand, in
the segments that suit it best; one copy by the kernel, straight out of the other process, as both
MPIs do with large messages; and, beside an all-reduce, one pass over the array, which each rank
must make at least. Takes four minutes; writes results/limits.md and .json.
"""

import argparse
import itertools
import math
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import beside
import pages

from pycoll.cli.measure.bench_report import sized

MOVED = [("through cells", "cells"), ("staged by hand", "staged"), ("kernel copies", "read")]
COLUMNS = {
    "all_reduce": [("staged by hand", "staged"), ("one pass", "touch")],
    "reduce": [("staged by hand", "staged")],
    "broadcast": MOVED,
    "all_gather": MOVED,
    "all_to_all": MOVED,
}
BY_HAND = ("staged", "read")


def table(rows, collective, columns):
    """Return the Markdown table of one collective; `columns` are (head, key in a row)."""
    heads = [f"{head} us | x" for head, _ in columns]
    lines = [f"| size | pages | arrays | pycoll us | {' | '.join(heads)} |"]
    lines.append("|---" * (4 + 2 * len(columns)) + "|")
    for row in (row for row in rows if row["collective"] == collective):
        cells = [sized(row["bytes"]), row["pages"], row["arrays"], f"{row['pycoll']['us']:.1f}"]
        for _, key in columns:
            found = row.get(key)
            cells += [f"{found['us']:.1f}", f"{found['x']:.2f}"] if found else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def section(rows, collective, columns):
    """Return the lines about one collective."""
    place = " in place" if collective in ("all_reduce", "broadcast") else ""
    return [f"## {collective}{place}", "", *table(rows, collective, columns), ""]


def summary(rows):
    """Return the table that tells of each collective how fast the best way by hand is."""
    lines = [
        "| best by hand | arrays again: mean | range | in turn: mean | range |",
        "|---" * 5 + "|",
    ]
    for collective in COLUMNS:
        cells = [collective]
        for arrays in ("again", "in turn"):
            found = [
                min(row[key]["x"] for key in BY_HAND if row.get(key))
                for row in rows
                if (row["collective"], row["arrays"]) == (collective, arrays)
            ]
            mean = math.exp(statistics.fmean(map(math.log, found)))
            cells += [f"{mean:.2f}", f"{min(found):.2f}-{max(found):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="limits", help="of the files that are written")
    name = parser.parse_args().name
    rows = beside.measure([2], "limits_ranks.py", "limit_staged.cpp", "-march=native")[2]
    about = (
        "Two ranks, float32, medians. x: the time of that as a part of pycoll's, the median over "
        "rounds that took all in turn; above 1, pycoll is faster."
    )
    sections = itertools.chain(*(section(rows, *item) for item in COLUMNS.items()))
    lines = [*summary(rows), *sections]
    pages.write(
        name, "limits.py", "Ordinary arrays beside the least they cost", about, lines, rows=rows
    )


if __name__ == "__main__":
    main()

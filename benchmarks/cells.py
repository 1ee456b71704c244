"""Time collectives of ordinary arrays by the size of the staging buffers (cells) they go through.

``python benchmarks/cells.py`` takes two to four minutes. The same ranks have communicators with
cells of every size, which take turns; a ratio is of the same round, and the median counts. It
prints a table and writes benchmarks/results/cells.md and .json.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics

import numpy as np
from harness import pages, start
from harness.ranks import contest

from pycoll.cli.common.text import sized
from pycoll.config import Config

WORLDS = (2, 4, 8)
CELLS = (128 << 10, 256 << 10, 512 << 10, 1 << 20)
SIZES = (1 << 20, 4 << 20, 16 << 20)
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
ARRAYS = ("again", "in turn")
TURN_BYTES, ROUNDS = 32 << 20, 15
POOL_BYTES = 96 << 20  # of arrays in turn: more than the caches hold


def pair_of(comm, name, nbytes):
    """Return input and output of a collective of float32 whose full vector has so many bytes."""
    part = nbytes // comm.world_size
    x = np.zeros((part if name == "all_gather" else nbytes) // 4, np.float32)
    out = np.zeros((part if name == "reduce_scatter" else nbytes) // 4, np.float32)
    if name in ("all_reduce", "broadcast"):
        out = x
    elif name == "reduce" and comm.rank > 0:
        out = None
    return x, out


def call_of(comm, name, nbytes, arrays):
    """Return what to call: the collective on the same arrays again, or on many in turn."""
    slots = 1 if arrays == "again" else max(2, POOL_BYTES // nbytes)
    turn = itertools.cycle([pair_of(comm, name, nbytes) for _ in range(slots)])

    def call(comm):
        x, out = next(turn)
        getattr(comm, name)(x, out=out)

    return call


def rank(comm):
    """Return the times of each collective and size, round by round with cells of every size."""
    session, config, rows = comm._session, comm._session.config, []
    for name, nbytes, arrays in itertools.product(COLLECTIVES, SIZES, ARRAYS):
        call, count = call_of(comm, name, nbytes, arrays), max(2, min(40, TURN_BYTES // nbytes))
        with contextlib.ExitStack() as stack:  # what one has found out is not the other's
            ways = {}
            for cell in CELLS:
                session.config = dataclasses.replace(config, cell_bytes=cell)
                own = stack.enter_context(comm.dup())
                ways[cell] = functools.partial(call, own), count
            found = contest(comm, ways, ROUNDS)
        row = {"n": comm.world_size, "collective": name, "bytes": nbytes, "arrays": arrays}
        rows.append(row | {"rounds": [found[cell]["seconds"] for cell in CELLS]})
    return rows


def ratios_of(row):
    """Return how long cells of every size take as a part of the time with the usual ones."""
    usual = row["rounds"][CELLS.index(Config.cell_bytes)]
    return [pages.ratio(times, usual) for times in row["rounds"]]


def line_of(row):
    cells = [row["collective"], str(row["n"]), sized(row["bytes"]), row["arrays"]]
    for times, ratio in zip(row["rounds"], ratios_of(row), strict=True):
        cells.append(f"{1e6 * statistics.median(times):.0f} us ({ratio:.2f})")
    return cells


def means(rows):
    """Return the lines of the table of the means over sizes and collectives."""
    for n, arrays in itertools.product(WORLDS, ARRAYS):
        ratios = [ratios_of(row) for row in rows if (row["n"], row["arrays"]) == (n, arrays)]
        ways = zip(*ratios, strict=True)
        yield [str(n), arrays, *(f"{statistics.geometric_mean(way):.2f}" for way in ways)]


def main():
    args = pages.arguments(__doc__, "cells").parse_args()
    rows = list(itertools.chain(*(start.measure(__file__, n) for n in WORLDS)))
    about = (
        "Ordinary arrays of float32, the same again or many in turn; medians, and how long that "
        f"takes as a part of the time with cells of {sized(Config.cell_bytes)}, the default: the "
        "median over rounds in which all sizes took turns, and first the means of all."
    )
    sizes = list(map(sized, CELLS))
    lines = [*pages.table(["ranks", "arrays", *sizes], means(rows)), ""]
    head = ["collective", "ranks", "size", "arrays", *sizes]
    lines += pages.table(head, map(line_of, rows))
    pages.write(args.name, "Cells of different sizes", about, lines, cells=CELLS, rows=rows)


if __name__ == "__main__":
    start.main(main, rank)

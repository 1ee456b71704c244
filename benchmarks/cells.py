"""Time collectives of ordinary arrays by the size of the cells that stage them.

``python benchmarks/cells.py`` takes two to four minutes. The same ranks have communicators with
cells of every size, which take turns; a ratio is of the same round, and the median counts. It
prints a table and writes benchmarks/results/cells.md and .json.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import pycoll
from pycoll.cli.measure.bench_report import sized
from pycoll.config import Config
from pycoll.runtime.startup.bootstrap import launched_by_us

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages
from overhead_ranks import batches

WORLDS = (2, 4, 8)
CELLS = (128 << 10, 256 << 10, 512 << 10, 1 << 20)
SIZES = (1 << 20, 4 << 20, 16 << 20)
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
ARRAYS = ("again", "in turn")
TURN_BYTES, ROUNDS, WARM = 32 << 20, 15, 8
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


def measure(comms, name, nbytes, arrays):
    """Return the times of a call by rounds, with cells of every size."""
    call = call_of(comms[0], name, nbytes, arrays)
    count = max(2, min(40, TURN_BYTES // nbytes))
    for comm in comms:
        batches(comm, functools.partial(call, comm), WARM, 1)
    rounds, shuffle = [], np.random.default_rng(0).permutation  # the same on all ranks
    for _ in range(ROUNDS):
        found = [0.0] * len(comms)
        for i in shuffle(len(comms)):
            found[i] = float(batches(comms[i], functools.partial(call, comms[i]), count, 1)[0])
        rounds.append(found)
    return rounds


def rank():
    """Measure; rank 0 prints a line of JSON for each collective and size."""
    with pycoll.init(tuning="off") as comm:
        session, config = comm._session, comm._session.config
        for name, nbytes, arrays in itertools.product(COLLECTIVES, SIZES, ARRAYS):
            with contextlib.ExitStack() as stack:  # what one has found out is not the other's
                comms = []
                for cell in CELLS:
                    session.config = dataclasses.replace(config, cell_bytes=cell)
                    comms.append(stack.enter_context(comm.dup()))
                rounds = measure(comms, name, nbytes, arrays)
            if comm.rank == 0:
                row = {"n": comm.world_size, "collective": name, "bytes": nbytes, "arrays": arrays}
                print(json.dumps(row | {"rounds": rounds}), flush=True)


def ratios_of(row):
    """Return how long cells of every size take as a part of the time with the usual ones."""
    usual, ways = CELLS.index(Config.cell_bytes), zip(*row["rounds"], strict=True)
    return [
        statistics.median(t / r[usual] for t, r in zip(way, row["rounds"], strict=True))
        for way in ways
    ]


def line_of(row):
    """Return one line of the table."""
    cells = [row["collective"], str(row["n"]), sized(row["bytes"]), row["arrays"]]
    for way, ratio in zip(zip(*row["rounds"], strict=True), ratios_of(row), strict=True):
        cells.append(f"{1e6 * statistics.median(way):.0f} us ({ratio:.2f})")
    return f"| {' | '.join(cells)} |"


def summary(rows):
    """Return the table of the means over sizes and collectives."""
    lines = [
        f"| ranks | arrays | {' | '.join(map(sized, CELLS))} |",
        "|---" * (2 + len(CELLS)) + "|",
    ]
    for n, arrays in itertools.product(WORLDS, ARRAYS):
        ratios = [ratios_of(row) for row in rows if (row["n"], row["arrays"]) == (n, arrays)]
        means = [f"{statistics.geometric_mean(way):.2f}" for way in zip(*ratios, strict=True)]
        lines.append(f"| {n} | {arrays} | {' | '.join(means)} |")
    return [*lines, ""]


def main():
    """Start the ranks and write the table, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="cells", help="of the files of results (cells)")
    args = parser.parse_args()
    if launched_by_us():
        rank()
        return
    rows = []
    for n in WORLDS:
        command = [sys.executable, "-m", "pycoll", "run", "-n", str(n), __file__]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
        print(f"{n} ranks are done", flush=True)
    about = (
        "Ordinary arrays of float32, the same again or many in turn; medians, and how long that "
        f"takes as a part of the time with cells of {sized(Config.cell_bytes)}, the default: the "
        "median over rounds in which all sizes took turns, and first the means of all."
    )
    head = f"| collective | ranks | size | arrays | {' | '.join(map(sized, CELLS))} |"
    table = [*summary(rows), head, "|---" * (4 + len(CELLS)) + "|", *map(line_of, rows)]
    pages.write(
        args.name, "cells.py", "Cells of different sizes", about, table, cells=CELLS, rows=rows
    )


if __name__ == "__main__":
    main()

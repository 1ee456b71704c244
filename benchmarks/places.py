"""Time calls of two ranks by where in a page their arrays begin: cache lines, or behind one.

``python benchmarks/places.py`` takes a quarter of a minute. Large arrays of NumPy begin 16 bytes
into a page, where malloc puts them; those of symmetric memory and of PyTorch on a cache line. It
should make little difference. All places take turns; a ratio is of two neighbouring turns, and the
median counts. It prints a table and writes benchmarks/results/places.md and .json.
"""

import argparse
import contextlib
import functools
import json
import mmap
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import pycoll
from pycoll.cli.measure.bench_report import sized
from pycoll.runtime.startup.bootstrap import launched_by_us

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages
from messages import there_and_back
from overhead_ranks import batches

# Bytes into a page, of the input and of the result.
PLACES = {
    "both at byte 0": (0, 0),
    "16": (16, 16),
    "64": (64, 64),
    "2064": (2064, 2064),
    "input at 0, result at 16": (0, 16),
    "input at 0, result at 64": (0, 64),
}
SIZES = (8 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
CALLS = {
    "all_reduce": ("all_reduce", np.float32, "sum"),
    "all_reduce of integers, avg": ("all_reduce", np.int32, "avg"),
    "broadcast": ("broadcast", np.float32, None),
    "all_gather": ("all_gather", np.float32, None),
    "all_to_all": ("all_to_all", np.float32, None),
    "message there and back": ("message", np.float32, None),
}
TURN_BYTES, ROUNDS = 16 << 20, 21
PAGE = mmap.PAGESIZE


def array(nbytes, dtype, place):
    """Return zeros that begin so many bytes into a page of 4 KiB."""
    block = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    raw = np.frombuffer(block, np.uint8)
    raw[:] = 0
    return raw[place : place + nbytes].view(dtype)


def call_of(comm, name, dtype, op, nbytes, places):
    """Return what to call."""
    part = nbytes // comm.world_size if name == "all_gather" else nbytes
    x, out = array(part, dtype, places[0]), array(nbytes, dtype, places[1])
    if name == "message":
        return functools.partial(there_and_back, comm, x, out)
    return functools.partial(getattr(comm, name), x, out=out, **({"op": op} if op else {}))


def rank():
    """Measure; rank 0 prints a line of JSON for each kind of call and size."""
    with pycoll.init(tuning="off") as comm:
        for title, call in CALLS.items():
            for nbytes in SIZES:
                with contextlib.ExitStack() as stack:
                    ways = [  # arrays of one shape share what a communicator finds out about them
                        call_of(stack.enter_context(comm.dup()), *call, nbytes, places)
                        for places in PLACES.values()
                    ]
                    count = max(3, min(200, TURN_BYTES // nbytes))
                    turns = [
                        [float(batches(comm, way, count, 1)[0]) for way in ways]
                        for _ in range(ROUNDS + 1)
                    ]
                if comm.rank == 0:
                    row = {"call": title, "bytes": nbytes, "turns": turns[1:]}
                    print(json.dumps(row), flush=True)


def line_of(row):
    """Return one line of the table."""
    cells = [row["call"], sized(row["bytes"])]
    for way in zip(*row["turns"], strict=True):
        ratios = [t / turn[0] for t, turn in zip(way, row["turns"], strict=True)]
        cells.append(f"{1e6 * statistics.median(way):.1f} us ({statistics.median(ratios):.2f})")
    return f"| {' | '.join(cells)} |"


def main():
    """Start the ranks and write the table, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="places", help="of the files of results (places)")
    args = parser.parse_args()
    if launched_by_us():
        rank()
        return
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", __file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    about = (
        "Two ranks, ordinary arrays so many bytes into a page: medians, and how long that takes as "
        "a part of the first column's time, the median over rounds in which all took turns."
    )
    head = f"| call | size | {' | '.join(PLACES)} |"
    table = [head, "|---" * (2 + len(PLACES)) + "|", *map(line_of, rows)]
    pages.write(
        args.name, "places.py", "Where arrays begin", about, table, places=list(PLACES), rows=rows
    )


if __name__ == "__main__":
    main()
